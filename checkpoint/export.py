"""python -m checkpoint.export DIR --to safetensors|torch [--out FILE] [--dtype bf16|fp16|fp32]: weights in one file.

They keep the names of the checkpoint without `model.`. `torch` writes what torch.load(FILE, weights_only=True) reads;
for exchange with others safetensors is the safer one, as it can hold nothing but tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.folder import locate
from checkpoint.manifest import check_small
from checkpoint.run_state import read_state
from checkpoint.store import read_tensors
from errors import CheckpointRefused, exit_code_of
from files import sync

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SUFFIX = {"safetensors": ".safetensors", "torch": ".pt"}
_WEIGHTS = "model."


def main(argv: list[str] | None = None) -> int:
    """Command line to exit code."""
    return exit_code_of(lambda: export(_options(argv)))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checkpoint.export", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, a folder of them, or a run")
    parser.add_argument("--to", choices=sorted(_SUFFIX), required=True, help="the kind of file")
    parser.add_argument("--out", type=Path, help="the file (default: RUN-step_N beside where you are)")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="round the weights to it (default: as they are)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    return parser.parse_args(argv)


def export(options: argparse.Namespace) -> None:
    """Write the file; every byte that is read is checked.

    Raises:
        CheckpointRefused: there is no checkpoint, or the file cannot be written.
        Damaged: it is not as it was written.
    """
    path = locate(options.folder)
    out: Path = options.out or Path(f"{path.resolve().parent.parent.name}-{path.name}{_SUFFIX[options.to]}")
    if out.exists() and not options.overwrite:
        raise CheckpointRefused(f"{out} is there already; choose another --out, or write --overwrite")
    check_small(path)
    state = read_state(path)
    weights = {name.removeprefix(_WEIGHTS): tensor for name, tensor in read_tensors(path, _WEIGHTS).items()}
    if options.dtype:
        weights = {name: _rounded(tensor, _DTYPES[options.dtype]) for name, tensor in weights.items()}
    try:
        write(weights, out, options.to, {"step": str(state.step), "tokens": str(state.tokens)})
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointRefused(f"cannot write {out}: {error}; make room or choose another --out") from error
    elements = sum(tensor.numel() for tensor in weights.values())
    print(f"{out}: {len(weights)} tensors, {elements:,} weights of step {state.step}, {out.stat().st_size:,} bytes")


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def write(weights: dict[str, Tensor], out: Path, kind: str, notes: dict[str, str]) -> None:
    """Write beside, force to the disk, rename."""
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        if kind == "torch":
            torch.save(weights, beside)
        else:
            save_file(weights, beside, metadata=notes)
        sync(beside)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    sync(out.absolute().parent)


if __name__ == "__main__":
    sys.exit(main())
