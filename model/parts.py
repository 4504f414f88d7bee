"""Which layers go on which pipeline stage."""

from __future__ import annotations

from itertools import accumulate

from model.config import ModelConfig
from model.flops import layer_weights
from model.transformer import Part, padded_vocabulary
from parallel.config import ParallelConfig
from parallel.schedules import SCHEDULES, schedule_name, split_layers, stages_of, stages_per_rank

_EMBEDDING_SHARE = 0.1  # of the head's cost: a look-up moves as much memory, but multiplies nothing


def layers_of_stages(config: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Layers of each stage: as configured, else so that the dearest stage is as cheap as can be."""
    if parallel.layers_per_stage:
        return list(parallel.layers_per_stage)
    costs = [float(layer_weights(config, layer)) for layer in range(config.layers)]
    head = float(config.hidden * padded_vocabulary(config))
    return split_layers(costs, parallel.pp * stages_per_rank(parallel), _EMBEDDING_SHARE * head, head)


def parts_of(config: ModelConfig, parallel: ParallelConfig, pp_rank: int) -> list[tuple[int, Part]]:
    """(stage number, what it holds) of one pipeline rank, in ascending order."""
    counts = layers_of_stages(config, parallel)
    ends = list(accumulate(counts))
    kind = SCHEDULES[schedule_name(parallel)]
    own = stages_of(pp_rank, parallel.pp, stages_per_rank(parallel), kind.v_shaped) if parallel.pp > 1 else [0]
    last = len(counts) - 1
    return [(n, Part(range(ends[n] - counts[n], ends[n]), first=n == 0, last=n == last)) for n in own]
