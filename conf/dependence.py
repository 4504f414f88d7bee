"""What of a run depends on its layout, by design: sentences for its log."""

from __future__ import annotations

from conf.moe_rules import layout_dependent_settings
from conf.schema import Config


def layout_dependent(config: Config) -> list[str]:
    """Each setting by which another micro-batch or another layout is another training, and why."""
    found = [f"{each.key}={each.value}: {each.rule}" for each in layout_dependent_settings(config.model)]
    if config.precision.in_fp8:
        found.append(f"precision={config.precision.name}: {_FP8.get(config.precision.name, _BLOCKS)}")
    return found


_FP8 = {
    "fp8_delayed": "histories of scales move on with every micro-batch, so that they depend on train.micro_batch",
    "fp8_current": "scales are of a rank's own micro-batch, so that they depend on train.micro_batch and on the layout",
}
_BLOCKS = "gradients of weights have scales for blocks of tokens, which depend on train.micro_batch and on the layout"
