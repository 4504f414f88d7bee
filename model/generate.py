"""python -m model.generate RUN --prompt TEXT: continue a text with a run's newest checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from checkpoint.folder import locate
from checkpoint.run_state import read_state
from checkpoint.store import model_tensors
from data.tokenizers.byte_tokenizer import BYTES
from data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from errors import DataRefused, exit_code_of
from model.config import ModelConfig, MoEConfig, RopeScaling
from model.transformer import Decoder


@torch.no_grad()
def continue_tokens(
    model: Decoder, tokens: list[int], *, count: int, context: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """`count` more tokens, each drawn from the model's top_k choices at `temperature` (0: the likeliest).

    The whole context (at most `context` latest tokens) is computed anew for each token: this is a look at a
    model, not a server.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(seed)
    out = list(tokens)
    for _ in range(count):
        window = torch.tensor(out[-context:], device=device)
        size = len(window)
        border = torch.tensor([0, size], dtype=torch.int32, device=device)
        positions = torch.arange(size, device=device)
        logits = model.logits(window, positions, border, size, documents=False)[-1].cpu()
        out.append(_draw(logits, temperature, top_k, generator))
    return out


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from logits [vocab]."""
    if temperature == 0.0:
        return int(logits.argmax())
    best, ids = (logits / temperature).topk(min(top_k, len(logits)) if top_k else len(logits))
    return int(ids[torch.multinomial(best.softmax(-1), 1, generator=generator)])


def continue_text(model: Decoder, tokenizer: Tokenizer, prompt: str, **options: Any) -> str:
    """The prompt and its continuation; an empty prompt starts a new document."""
    tokens = tokenizer.encode(prompt) or [tokenizer.eod]
    with torch.compiler.set_stance("force_eager"):  # every token has another length
        return tokenizer.decode(continue_tokens(model, tokens, **options))


def model_config(saved: dict[str, Any]) -> ModelConfig:
    """The model's config from a checkpoint's plain values."""
    scaling, moe = saved.get("rope_scaling"), saved.get("moe")
    sections = {"rope_scaling": RopeScaling(**scaling) if scaling else None, "moe": MoEConfig(**moe) if moe else None}
    return ModelConfig(**saved | sections)


def load_model(checkpoint: Path) -> Decoder:
    """The decoder of a checkpoint, fp32, on the CPU or the CUDA device."""
    state = read_state(checkpoint)
    config = model_config(state.config["model"] | {"vocab_size": state.vocab_size})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Decoder(config, torch.device("meta")).to(torch.float32).to_empty(device=device)
    model.load_state_dict(model_tensors(checkpoint, torch.float32))
    return model.eval()


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's directory, or one checkpoint's")
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--tokens", type=int, default=100, help="how many tokens to add (100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among this many likeliest; 0: all (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    options = parser.parse_args(argv)
    if options.tokens < 0 or options.temperature < 0 or options.top_k < 0:
        parser.error("--tokens, --temperature and --top-k must not be negative")
    return options


def _checkpoints(run: Path) -> Path:
    """The folder that a run's configuration names for its checkpoints, else the path itself."""
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    elsewhere = config.get("checkpoint", {}).get("dir")
    return Path(elsewhere).expanduser() if elsewhere else run


def _run(options: argparse.Namespace) -> None:
    checkpoint = locate(_checkpoints(options.run))
    state = read_state(checkpoint)
    if state.tokenizer is None:
        raise DataRefused(f"{checkpoint} was trained without a known tokenizer: no text can be encoded for it")
    tokenizer = state.tokenizer if state.tokenizer == BYTES else checkpoint / state.tokenizer
    text = continue_text(
        load_model(checkpoint), load_tokenizer(tokenizer), options.prompt,
        count=options.tokens, context=state.config["train"]["seq_len"],
        temperature=options.temperature, top_k=options.top_k, seed=options.seed,
    )  # fmt: skip
    print(text)


def main(argv: list[str] | None = None) -> int:
    """Command line; a refusal is a message and its exit code."""
    options = _options(argv)
    return exit_code_of(lambda: _run(options))


if __name__ == "__main__":
    sys.exit(main())
