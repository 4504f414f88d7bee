"""python -m checkpoint.inspect DIR [--verify] [--tensors]: what a checkpoint holds; or, whether it is as written.

DIR is a checkpoint, a folder of checkpoints, or a run; of several, the newest is shown and the others are listed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path

from checkpoint.agreement import Damaged
from checkpoint.folder import list_checkpoints, locate
from checkpoint.manifest import Manifest, check_small, verify
from checkpoint.pieces import Index
from checkpoint.run_state import RunState, read_state
from checkpoint.tensors import read_contents
from errors import CheckpointRefused, exit_code_of


def main(argv: list[str] | None = None) -> int:
    """Command line to exit code; 3 where the checkpoint, or with --verify any of them, is damaged."""
    return exit_code_of(lambda: _main(_options(argv)))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m checkpoint.inspect", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, a folder of them, or a run")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare hashes, of all checkpoints")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only the groups")
    return parser.parse_args(argv)


def _main(options: argparse.Namespace) -> None:
    path = locate(options.folder)
    inside = list_checkpoints(path.parent)
    others = [each for each in inside if each != path] if options.folder.resolve() != path.resolve() else []
    if options.verify:
        _verify([*others, path])
        return
    for line in describe(path, every_tensor=options.tensors):
        print(line)
    if others:
        print(f"older: {', '.join(each.name for each in others)}")


def _verify(paths: list[Path]) -> None:
    """Say of each whether it is sound.

    Raises:
        CheckpointRefused: one is not.
    """
    bad = []
    for path in paths:
        try:
            manifest = verify(path)
            print(f"{path.name}: sound, {_size(sum(each.size for each in manifest.files.values()))} read")
        except Damaged as damage:
            if not path.exists():
                print(f"{path.name}: removed while it was read, as a run saves here")
                continue
            bad.append(f"{path.name}: {damage.file.name}: {damage.reason}")
            print(f"{bad[-1]}  DAMAGED")
    if bad:
        raise CheckpointRefused(
            f"{len(bad)} of {len(paths)} checkpoints damaged:\n" + "\n".join(bad) + "\n"
            "checkpoint.resume=auto passes over them; restore them from a copy, or remove them"
        )


def describe(path: Path, every_tensor: bool = False) -> Iterator[str]:
    """Lines about the checkpoint in folder `path`.

    Raises:
        Damaged: its small files cannot be read.
    """
    manifest, state = check_small(path), read_state(path)
    yield f"{path}"
    yield from _about(state, manifest)
    yield "files:"
    for name, entry in sorted(manifest.files.items()):
        yield f"  {name:<28} {_size(entry.size):>10}  {entry.hash}"
    tensors = read_contents(path).tensors
    yield "tensors:"
    yield from _every(tensors) if every_tensor else _groups(tensors)


def _about(state: RunState, manifest: Manifest) -> Iterator[str]:
    """What the run was at."""
    model = state.config.get("model", {})
    yield f"  step {state.step:,} ({state.updates:,} updates), {state.samples:,} samples, {state.tokens:,} tokens"
    yield f"  model {model.get('name')}, precision {state.config.get('precision', {}).get('name')}"
    yield f"  written by: {state.layout}; format {manifest.format}"
    yield "  versions: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"  tokenizer: {state.tokenizer or 'unknown'}; data: {', '.join(sorted(state.data)) or 'none'}"
    if state.rewound:
        yield f"  went back to steps {', '.join(map(str, state.rewound))} on its way"


def _groups(tensors: Index) -> Iterator[str]:
    """The tree: weights, moments and what else there is, with the rooms of the model under each."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, entry in tensors.items():
        head, _, rest = name.partition(".")
        if head == "optim":
            kind, _, rest = rest.partition(".")
            head = f"optim.{kind}"
        room = rest.partition(".")[0]
        for key in ((head, ""), (head, room)):
            elements = prod(entry.shape)
            each = sizes[key]
            each[0], each[1], each[2] = each[0] + 1, each[1] + elements, each[2] + elements * entry.dtype.itemsize
    for (head, room), (count, elements, size) in sorted(sizes.items()):
        name = f"    {head}.{room}" if room else f"  {head}"
        yield f"{name:<30} {count:>6} tensors {elements:>16,} elements {_size(size):>10}"


def _every(tensors: Index) -> Iterator[str]:
    for name, entry in sorted(tensors.items()):
        kind = str(entry.dtype).removeprefix("torch.")
        yield f"  {name:<56} {kind:<9} {list(entry.shape)} in {len(entry.pieces)}"


def _size(size: int) -> str:
    """Bytes for people (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
