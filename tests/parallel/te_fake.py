"""A stand-in for Transformer Engine on a CPU: its state machine as its sources have it, the emulation's arithmetic.

Every call is bound to the real signature first. What stands here is our reading of transformer_engine.pytorch's
quantization.py, distributed.py and module/base.py, cut down to what te.py uses.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.fp8.formats import FORMATS, delayed_scale, quantize_tensor
from tests.parallel.te_sources import PACKAGE, signature

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")


@dataclass
class World:
    """What Transformer Engine keeps for the process."""

    enabled: bool = False
    recipe: Any = None
    group: Any = None
    first_module: bool = False
    depth: int = 0
    recomputing: bool = False
    recompute_region: bool = False
    flags: list[bool] = field(default_factory=list)
    metas: list[dict[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """Which kinds of histories were moved on, in order."""
    told: list[bool | None] = field(default_factory=list)
    """is_first_microbatch of each call."""

    def close(self, key: str) -> None:
        """reduce_and_update_fp8_tensors."""
        self.closed.append(key)
        for meta in self.metas:
            state, recipe = meta[key], meta["recipe"]
            latest = recipe.amax_compute_algo == "most_recent"
            amax = state.amax_history[0].clone() if latest else state.amax_history.amax(0)
            state.scale.copy_(delayed_scale(amax, state.scale, _form(recipe, key), recipe.margin))
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0].zero_()


def _form(recipe: Any, key: str) -> Any:
    return FORMATS["e5m2" if recipe.fp8_format == "HYBRID" and key == BACKWARD else "e4m3"]


def checked(dotted: str, function: Callable[..., Any], bound: bool = False) -> Callable[..., Any]:
    """function, whose arguments the real signature must take; bound: it is a method."""

    def call(*args: Any, **kwargs: Any) -> Any:
        signature(f"{PACKAGE}.{dotted}").bind(*args[int(bound) :], **kwargs)
        return function(*args, **kwargs)

    return call


def _recipe(name: str) -> Callable[..., Any]:
    return checked(f"common.recipe.{name}", lambda **given: SimpleNamespace(name=name, **given))


def scaled(out: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A product times both inverses, in fp32 at least, rounded once more."""
    return out.to(torch.promote_types(out.dtype, torch.float32)).mul_(one * other).to(out.dtype)


class _Product(torch.autograd.Function):
    """x w^T by the scales that the module has now; those of the gradient when it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any, kept: Tensor, inverse: Tensor) -> Tensor:
        values = module.rounded(x, FORWARD, 0)
        ctx.save_for_backward(values.values, values.inverse, kept, inverse)
        ctx.module, world = module, module.world
        ctx.closes, before = world.first_module, world.first_module
        world.first_module = before if world.recomputing else False
        return scaled(values.values.to(x.dtype) @ kept.to(x.dtype).t(), values.inverse, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, by_x, w, by_w = ctx.saved_tensors
        g = ctx.module.rounded(grad, BACKWARD, 0)
        dx = scaled(g.values.to(grad.dtype) @ w.to(grad.dtype), g.inverse, by_w)
        dw = scaled(g.values.to(grad.dtype).t() @ x.to(grad.dtype), g.inverse, by_x)
        if ctx.closes:
            ctx.module.world.close(BACKWARD)
        return dx, dw, None, None, None


class _Base(nn.Module):
    """te.Linear with delayed scaling."""

    world: World

    def __init__(self, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        dtype, device = given["params_dtype"], given["device"]
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.fp8_meta: dict[str, Any] = {}
        self.workspace: tuple[Tensor, Tensor] | None = None
        self.queue: deque[tuple[Tensor, Tensor]] = deque()
        self.registered = False

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        world = self.world
        if not world.enabled or "recipe" in self.fp8_meta:
            return
        self.fp8_meta |= {"recipe": world.recipe, "fp8_group": world.group}
        length = getattr(world.recipe, "amax_history_len", 1)
        for key, count in ((FORWARD, 3 * num_gemms), (BACKWARD, 2 * num_gemms)):
            self.fp8_meta[key] = SimpleNamespace(amax_history=torch.zeros(length, count), scale=torch.ones(count))

    def rounded(self, x: Tensor, key: str, index: int) -> Any:
        state = self.fp8_meta[key]
        newest = state.amax_history[0, index]
        newest.copy_(torch.maximum(newest, x.detach().abs().amax().float()))
        return quantize_tensor(x, state.scale[index].clone(), _form(self.fp8_meta["recipe"], key))

    def _weight(self, first: bool | None) -> tuple[Tensor, Tensor]:
        if first is False and self.workspace is not None:
            return self.workspace
        made = self.rounded(self.weight.detach(), FORWARD, 1)
        if first is not None:
            self.workspace = made.values, made.inverse
        return made.values, made.inverse

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        world, state = self.world, self.fp8_meta[FORWARD]
        if not world.enabled:
            raise AssertionError("outside of autocast")
        world.told.append(is_first_microbatch)
        now = state.amax_history.clone(), state.scale.clone()
        if world.recomputing:
            state.amax_history.copy_(self.queue[0][0])
            state.scale.copy_(self.queue.popleft()[1])
        elif not self.registered:
            world.metas.append(self.fp8_meta)
            self.registered = True
        if world.recompute_region and not world.recomputing:
            self.queue.append(now)
        try:
            result: Tensor = _Product.apply(inp, self.weight, self, *self._weight(is_first_microbatch))
            return result
        finally:
            if world.recomputing:
                state.amax_history.copy_(now[0])
                state.scale.copy_(now[1])


def install(monkeypatch: Any) -> World:
    """Put the stand-in in the place of transformer_engine for a test."""
    world = World()

    def get() -> tuple[Any, ...]:
        return world.enabled, world.recipe, world.group, world.first_module

    def put(state: tuple[Any, ...]) -> None:
        world.enabled, world.recipe, world.group, world.first_module = state

    @contextmanager
    def autocast(enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
        before = get()
        world.enabled, world.recipe, world.group = enabled, recipe, amax_reduction_group
        world.first_module = world.first_module or world.depth == 0
        world.depth += 1
        try:
            yield
        finally:
            put(before)
            world.depth -= 1
            if enabled and world.depth == 0 and torch.is_grad_enabled():
                world.close(FORWARD)

    @contextmanager
    def phase(second: bool) -> Iterator[None]:
        world.recompute_region, world.recomputing = True, second
        if second:
            world.first_module = world.flags.pop(0)
        else:
            world.flags.append(world.first_module)
        try:
            yield
        finally:
            world.recompute_region = world.recomputing = False

    _put_modules(monkeypatch, world, autocast, lambda: (phase(False), phase(True)), get, put)
    return world


def _put_modules(monkeypatch: Any, world: World, autocast: Any, contexts: Any, get: Any, put: Any) -> None:
    prefix = "pytorch.Linear"
    methods = {
        "__init__": checked(prefix, _Base.__init__, bound=True),
        "forward": checked(f"{prefix}.forward", _Base.forward, bound=True),
        "fast_setattr": checked(f"{prefix}.fast_setattr", _Base.fast_setattr, bound=True),
        "init_fp8_metadata": checked(f"{prefix}.init_fp8_metadata", _Base.init_fp8_metadata, bound=True),
    }
    linear = type("Linear", (_Base,), {**methods, "world": world})
    recipe = SimpleNamespace(
        Format=SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3"),
        **{name: _recipe(name) for name in RECIPES},
    )
    manager = "pytorch.quantization.FP8GlobalStateManager"
    fp8 = SimpleNamespace(
        get_autocast_state=checked(f"{manager}.get_autocast_state", get),
        set_autocast_state=checked(f"{manager}.set_autocast_state", put),
    )
    contexts = checked("pytorch.distributed.get_activation_recompute_contexts", contexts)
    contents: dict[str, dict[str, Any]] = {
        PACKAGE: {},
        f"{PACKAGE}.common": {"recipe": recipe},
        f"{PACKAGE}.pytorch": {"Linear": linear, "autocast": checked("pytorch.autocast", autocast)},
        f"{PACKAGE}.pytorch.quantization": {"FP8GlobalStateManager": fp8},
        f"{PACKAGE}.pytorch.distributed": {"get_activation_recompute_contexts": contexts},
        f"{PACKAGE}.pytorch.constants": {
            "FP8FwdTensorIdx": SimpleNamespace(GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM1_OUTPUT=2),
            "FP8BwdTensorIdx": SimpleNamespace(GRAD_OUTPUT1=0, GRAD_INPUT1=1),
        },
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in contents}
    for name, made in modules.items():
        made.__dict__.update(contents[name])
        made.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, made)
        monkeypatch.setitem(sys.modules, name, made)
