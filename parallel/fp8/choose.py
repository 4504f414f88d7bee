"""Who makes FP8 products: Transformer Engine where the device and the run allow it, else its arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from errors import ConfigRefused
from parallel.device import Choice
from parallel.fp8.state import FP8
from parallel.fp8.te import TransformerEngine
from parallel.mesh import Axis
from parallel.precision import PrecisionConfig

_KEY = "precision.fp8.backend"


class Able(NamedTuple):
    """The GPUs that have a recipe, by what Transformer Engine 2.20.2 checks."""

    least: tuple[int, int]
    """Lowest compute capability."""
    below: tuple[int, int] = (99, 0)
    """The first that has it no more."""
    cuda: tuple[int, int] = (12, 1)
    """Lowest version of CUDA."""


ABLE = {
    "fp8_delayed": Able((8, 9)),
    "fp8_current": Able((8, 9)),
    "fp8_block": Able((9, 0), cuda=(12, 9)),
    "mxfp8": Able((10, 0), below=(12, 0)),
}
"""By name of the precision (`check_fp8_support`, `check_fp8_block_scaling_support`, `check_mxfp8_support` there)."""


def choose_backend(config: PrecisionConfig, device: torch.device, obstacle: str | None = None) -> Choice:
    """te or emulate, for one of the FP8 precisions.

    Args:
        obstacle: why the run's layout or model rules Transformer Engine out on any device.
    """
    asked = config.fp8.backend
    if asked == "emulate":
        return Choice("emulate", f"{_KEY}=emulate")
    fault = _fault_of_device(config.name, device) or obstacle or _fault_of_import()
    if fault is None:
        reason = torch.cuda.get_device_name(device)
        return Choice("te", f"{_KEY}=te on {reason}" if asked == "te" else f"{reason} and Transformer Engine")
    if asked == "te":
        raise ConfigRefused(
            f"{_KEY}=te\n     rule: Transformer Engine cannot make these products: {fault}\n"
            f"     fix:  write {_KEY}=emulate for its arithmetic, slowly; or {_KEY}=auto"
        )
    return Choice("emulate", f"by its arithmetic, slowly; no Transformer Engine: {fault}")


def _fault_of_device(name: str, device: torch.device) -> str | None:
    """Why a device has not got a recipe, if it has not."""
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    able, capability = ABLE[name], torch.cuda.get_device_capability(device)
    if not able.least <= capability < able.below:
        needed = f"at least {_dotted(able.least)}" + (f", below {_dotted(able.below)}" if able.below[0] < 99 else "")
        return f"{name} needs a compute capability of {needed}, and {_dotted(capability)} is this GPU's"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if version < able.cuda:
        return f"{name} needs CUDA {_dotted(able.cuda)}, and PyTorch here is made for {torch.version.cuda}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _fault_of_import() -> str | None:
    """Why Transformer Engine cannot be used here, if it cannot; torch must have been imported before it."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # of a missing library: OSError, RuntimeError or an assertion, by version
        words = str(error).strip().splitlines()
        return f"transformer_engine.pytorch: {words[0] if words else type(error).__name__}"
    return None


def with_backend(config: PrecisionConfig, choice: Choice) -> PrecisionConfig:
    """The same with a choice in the place of auto."""
    return replace(config, fp8=replace(config.fp8, backend="te" if choice.value == "te" else "emulate"))


def scales_of_part(config: PrecisionConfig, layers: int, dense: Axis, experts: Axis) -> FP8:
    """What one part of the model makes its products with, by a settled choice; auto is the emulation."""
    maker = TransformerEngine if config.fp8.backend == "te" else FP8
    return maker(config, layers, dense, experts)
