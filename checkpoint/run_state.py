"""Everything but tensors that a run needs to go on: state.json of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from checkpoint.agreement import Damaged
from errors import CheckpointRefused

FORMAT = 4  # raised when a reader of the old form would misread the new one
STATE = "state.json"
_TYPES = {
    "step": int, "samples": int, "tokens": int, "updates": int, "data": dict, "config": dict, "vocab_size": int,
    "choices": dict, "layout": str, "phases": list, "rewound": list,
}  # fmt: skip


@dataclass(frozen=True)
class RunState:
    """Where a run stands, and what it is."""

    step: int
    """Steps done, skipped ones included; also the schedule's position."""
    samples: int
    """Sequences seen: the data cursor."""
    tokens: int
    """Tokens seen."""
    updates: int
    """Steps that changed the weights."""
    data: dict[str, str]
    """Fingerprint of each source's content."""
    config: dict[str, Any]
    """The run's whole configuration, as it was given."""
    vocab_size: int
    """Entries of the model's vocabulary."""
    tokenizer: str | None = None
    """The tokenizer's file in the checkpoint, or `bytes`; None: unknown."""
    tokenizer_fingerprint: str | None = None
    """Hash of the tokenizer that made the data; None: unknown."""
    rewound: list[int] = field(default_factory=list)
    """Steps that the run has gone back to on its way here."""
    phases: list[dict[str, Any]] = field(default_factory=list)
    """Mixtures that the run has gone through, as `data.samples.Phase`."""
    choices: dict[str, str] = field(default_factory=dict)
    """Automatic choices that must not change when the run goes on."""
    layout: str = "one process"
    """How the processes that wrote it shared the work, in words."""
    wandb_id: str | None = None
    """W&B run to go on with."""
    format: int = FORMAT
    """Version of this layout of files."""

    def to_json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=1)


def read_state(path: Path) -> RunState:
    """The state of the checkpoint in folder `path`.

    Raises:
        CheckpointRefused: not a checkpoint, or one of another format.
        Damaged: it does not hold a run's state.
    """
    file = path / STATE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(path, file, str(error)) from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise CheckpointRefused(f"{file} has format {found}, this version reads format {FORMAT}")
    wrong = [key for key, kind in _TYPES.items() if not isinstance(raw.get(key), kind)]
    unknown = raw.keys() - {each.name for each in fields(RunState)}
    if wrong or unknown:
        raise Damaged(path, file, f"it does not hold a run's state ({', '.join(sorted({*wrong, *unknown}))})")
    return RunState(**raw)
