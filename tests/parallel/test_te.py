"""Transformer Engine behind the emulation's interface: calls bound to its sources, states against a stand-in."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parallel.fp8.te as te_module
from errors import ConfigRefused
from model.build import BuildOptions, build_part
from model.config import ModelConfig
from model.transformer import Part
from parallel.fp8.choose import ABLE
from parallel.fp8.state import FP8, slots_of
from parallel.fp8.te import TransformerEngine, te_recipe
from parallel.mesh import ALONE, ONE_PROCESS
from parallel.precision import FP8Config, PrecisionConfig
from parallel.recompute import recomputed
from parallel.tensor import Linears
from tests.parallel.te_fake import World, install
from tests.parallel.te_sources import calls, folder, source_of, unbound

SOURCE = Path(te_module.__file__).read_text()
TREE = ast.parse(SOURCE)
TARGETS = {
    "common.recipe.DelayedScaling", "common.recipe.Float8CurrentScaling", "common.recipe.Float8BlockScaling",
    "common.recipe.MXFP8BlockScaling", "pytorch.Linear", "pytorch.Linear.forward", "pytorch.Linear.fast_setattr",
    "pytorch.Linear.init_fp8_metadata", "pytorch.autocast",
    "pytorch.distributed.get_activation_recompute_contexts",
    "pytorch.quantization.FP8GlobalStateManager.get_autocast_state",
    "pytorch.quantization.FP8GlobalStateManager.set_autocast_state",
}  # fmt: skip
KEYWORDS = sorted({
    (target.split(".", 1)[1], keyword.arg)
    for target, call in calls(TREE) for keyword in call.keywords if keyword.arg
})  # fmt: skip
RELIED_ON = [
    # what of Transformer Engine, and the words in it that te.py counts on
    ("pytorch.Linear._get_weight_tensors", "getattr(self, name) for name in self.weight_names"),
    ("pytorch.Linear.__init__", "self.weight_names = ['weight']"),
    ("pytorch.Linear.__init__", "self.reset_parameters(defer_init=device == 'meta')"),
    ("pytorch.Linear.forward", "None if is_first_microbatch is None or self.is_fsdp2 else 'weight'"),
    ("pytorch.Linear.fast_setattr", "self.__dict__[name] = value"),
    ("pytorch.Linear.is_fsdp2", "_get_module_fsdp_state(self)"),
    ("pytorch.Linear.set_meta_tensor", "super().set_meta_tensor(fwd, recipe)"),
    ("pytorch.module.base.TransformerEngineBaseModule.set_meta_tensor", "'scaling_fwd' if fwd else 'scaling_bwd'"),
    ("pytorch.Linear.init_fp8_metadata", "FP8GlobalStateManager.get_fp8_recipe() == _original_recipe"),
    ("pytorch.Linear.init_fp8_metadata", "meta['fp8_group'] = FP8GlobalStateManager.get_fp8_group()"),
    ("pytorch.Linear.backward_dw", "weight_tensor.grad = wgrad.to(weight_tensor.dtype)"),
    ("pytorch.Linear.end_forward", "FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)"),
    ("pytorch.Linear._get_quantizers", "self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM1_INPUT]"),
    ("pytorch.Linear._get_quantizers", "self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT1]"),
    ("pytorch.Linear._get_weight_quantizers", "self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM1_WEIGHT]"),
    ("pytorch.quantization.DelayedScalingRecipeState.__init__",
     "self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers,"),
    ("pytorch.quantization.DelayedScalingRecipeState.__init__", "self.scale = torch.ones(num_quantizers,"),
    ("pytorch.quantization.FP8GlobalStateManager.autocast_exit",
     "if enabled and qstate.autocast_depth == 0 and (not _graph) and torch.is_grad_enabled():"),
    ("pytorch.quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors",
     "torch.distributed.is_initialized() and (torch.distributed.get_world_size(group=group) > 1"),
    ("pytorch.quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors",
     "in qstate.global_amax_buffer.items()"),
    ("pytorch.quantization.FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute", "].popleft()"),
    ("pytorch.quantization._update_amax_history", "amax_history[0].fill_(0.0)"),
    ("pytorch.distributed.activation_recompute_forward.__enter__", "_is_first_fp8_module.pop(0)"),
    ("pytorch.module.linear._Linear.backward", "FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)"),
]  # fmt: skip


def test_every_call_of_transformer_engine_is_found_and_taken_by_its_sources() -> None:
    assert {target.split(".", 1)[1] for target, _ in calls(TREE)} == TARGETS
    assert unbound(TREE) == []


@pytest.mark.parametrize(("target", "keyword"), KEYWORDS, ids=[f"{t}-{k}" for t, k in KEYWORDS])
def test_a_renamed_argument_is_noticed(target: str, keyword: str) -> None:
    changed = ast.parse(SOURCE)
    for found, call in calls(changed):
        for each in call.keywords:
            if found.endswith(f".{target}") and each.arg == keyword:
                each.arg = f"{keyword}_"
    (fault,) = unbound(changed)
    assert target in fault
    assert keyword in fault


@pytest.mark.parametrize("extra", [0, 1], ids=["one too few", "one too many"])
def test_a_positional_argument_too_few_or_too_many_is_noticed(extra: int) -> None:
    changed = ast.parse(SOURCE)
    for found, call in calls(changed):
        if found.endswith("pytorch.Linear"):
            call.args = [call.args[0]] if extra == 0 else [*call.args, *[call.args[0]] * 30]
    assert len(unbound(changed)) == 1


@pytest.mark.parametrize(("name", "words"), RELIED_ON, ids=[name for name, _ in RELIED_ON])
def test_the_sources_have_what_te_relies_on(name: str, words: str) -> None:
    assert words in source_of(f"transformer_engine.{name}")


def test_the_indices_of_tensors_are_named_as_te_names_them() -> None:
    text = (folder() / "pytorch" / "constants.py").read_text()
    assert all(f"    {name}=" in text for name in ("GEMM1_INPUT", "GEMM1_WEIGHT", "GRAD_OUTPUT1"))


class Net(nn.Module):
    """Two linears, as a block has them."""

    def __init__(self, fp8: FP8, again: bool) -> None:
        super().__init__()
        linears = Linears(ALONE, None, fp8)
        self.one = linears.column(32, 48, False, None)
        self.two = linears.row(48, 16, False, None)
        self.fp8, self.again = fp8, again
        torch.manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)
        fp8.allocate(torch.device("cpu"))

    def body(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor, first: bool) -> Tensor:
        with self.fp8.forward(first, True):
            again = self.again and torch.is_grad_enabled()
            return recomputed(self.body, x, fp8=self.fp8) if again else self.body(x)


def precision(**settings: object) -> PrecisionConfig:
    return PrecisionConfig("fp8_delayed", fp8=FP8Config("te", history=4, **settings))  # type: ignore[arg-type]


def batch(number: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(number)) * (1 + number % 5)


def step(net: Net, number: int, in_flight: bool) -> list[Tensor]:
    """Two micro-batches, an evaluation, and a small update: all that came out."""
    outputs = []
    if in_flight:
        outputs = [net(batch(10 * number + mb), mb == 0) for mb in range(2)]
        for out in outputs:
            out.square().sum().backward()
    else:
        for mb in range(2):
            outputs.append(net(batch(10 * number + mb), mb == 0))
            outputs[-1].square().sum().backward()
    with torch.no_grad():
        for weight in net.parameters():
            assert weight.grad is not None
            outputs.append(weight.grad)
            weight.sub_(0.05 * weight.grad / weight.grad.norm())
            weight.grad = None
        outputs.append(net(100 * batch(number + 7), False))
    return [each.detach() for each in outputs]


def states(net: Net) -> dict[str, Tensor]:
    return {f"{name}.{kind}": t.clone() for name, slot in slots_of(net) for kind, t in slot.state().items()}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Of the stand-in."""
    folder()  # found before the stand-in hides it
    return install(monkeypatch)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["in turn", "two in flight"])
@pytest.mark.parametrize("settings", [{}, {"amax": "most_recent", "margin": 1}, {"format": "e4m3"}], ids=str)
def test_a_run_is_the_emulations_to_the_bit_and_so_are_its_scales(
    world: World, settings: dict[str, object], in_flight: bool, again: bool
) -> None:
    config = precision(**settings)
    ours, theirs = (Net(maker(config, 2), again) for maker in (FP8, TransformerEngine))
    for number in range(6):
        for mine, other in zip(step(ours, number, in_flight), step(theirs, number, in_flight), strict=True):
            assert torch.equal(mine, other)
        wanted, made = states(ours), states(theirs)
        assert list(wanted) == list(made)
        assert all(torch.equal(wanted[key], made[key]) for key in wanted)
    assert world.depth == 0
    assert not world.flags
    order = [0, 0, 1, 1] if in_flight else [0, 1, 0, 1]
    assert world.closed == [("scaling_fwd", "scaling_bwd")[each] for each in order] * 6


def test_weights_are_rounded_once_a_step_and_kept_nowhere_by_an_evaluation(world: World) -> None:
    net = Net(TransformerEngine(precision(), 2), again=True)
    step(net, 0, in_flight=False)
    first, other = [True] * 2, [False] * 2
    assert world.told == [*first, *other, *other, *other, None, None]  # forward, again, forward, again, evaluation


def test_no_parameter_module_or_state_of_transformer_engine_is_in_the_model(world: World) -> None:
    net = Net(TransformerEngine(precision(), 2), again=False)
    assert [name for name, _ in net.named_parameters()] == ["one.weight", "two.weight"]
    assert list(net.state_dict()) == ["one.weight", "two.weight"]
    assert not any("transformer_engine" in str(type(module)) for module in net.modules())
    assert all(next(slot.linear.parameters(), None) is None for slot in net.fp8.linears)  # type: ignore[attr-defined]


def test_a_run_goes_on_from_saved_scales_as_if_never_stopped(world: World) -> None:
    whole = Net(TransformerEngine(precision(), 2), again=True)
    for number in range(3):
        step(whole, number, in_flight=False)
    saved = {name: {k: t.clone() for k, t in slot.state().items()} for name, slot in slots_of(whole)}
    assert {k: tuple(t.shape) for k, t in saved["one.weight"].items()} == {"history": (3, 4), "scale": (3,)}
    resumed = Net(TransformerEngine(precision(), 2), again=True)
    resumed.load_state_dict(whole.state_dict())
    for name, slot in slots_of(resumed):
        for kind, tensor in slot.state().items():
            tensor.copy_(saved[name][kind])
    wanted = [*step(whole, 3, False), *states(whole).values()]
    world.metas.clear()  # another process
    made = [*step(resumed, 3, False), *states(resumed).values()]
    assert all(torch.equal(mine, other) for mine, other in zip(wanted, made, strict=True))


def test_a_pass_of_one_part_moves_the_histories_of_another_which_is_why_a_process_may_have_one(world: World) -> None:
    one, other = (Net(TransformerEngine(precision(), 2), again=False) for _ in range(2))
    step(one, 0, in_flight=False)
    before = states(one)
    step(other, 1, in_flight=False)
    assert not torch.equal(before["one.weight.history"], states(one)["one.weight.history"])


def test_a_decoder_is_built_and_runs_with_the_names_that_the_emulation_has(world: World) -> None:
    shape = ModelConfig(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab_size=128, window=None)
    cpu, made = torch.device("cpu"), {}
    for backend in ("emulate", "te"):
        fp8 = replace(precision(), fp8=replace(precision().fp8, backend=backend))
        options = BuildOptions(1, cpu, torch.float32, torch.float32, recompute="full", fp8=fp8)
        made[backend] = build_part(shape, Part(range(2)), ONE_PROCESS, options)
    losses = []
    for built in made.values():
        assert built.fp8 is not None
        tokens = torch.arange(32) % 128
        for first in (True, False):
            with built.fp8.forward(first, True):
                sums = built.decoder(
                    tokens, tokens, torch.arange(32), torch.tensor([0, 32]), 32, documents=False, scale=1 / 32
                )
            sums.objective.backward()
        losses.append(sums.objective.detach())
    assert torch.equal(*losses)
    names = [{f"{kind}.{n}" for n, slot in slots_of(b.decoder) for kind in slot.state()} for b in made.values()]
    assert names[0] == names[1]
    pairs = zip(*(b.decoder.named_parameters() for b in made.values()), strict=True)
    assert all(n == m and torch.equal(a.grad, b.grad) for (n, a), (m, b) in pairs)


@pytest.mark.parametrize("name", ABLE)
def test_a_recipe_has_our_settings_and_nothing_of_the_environment(world: World, name: str) -> None:
    config = PrecisionConfig(name, fp8=FP8Config(margin=2, history=8, amax="most_recent", format="e4m3"))  # type: ignore[arg-type]
    made = te_recipe(config, shared=False)
    assert made.fp8_format == "E4M3"
    assert made.backward_override is None
    if name == "fp8_delayed":
        assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (2, 8, "most_recent")
        assert made.reduce_amax is False  # else a stage on one rank would wait for the whole world


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda fp8: fp8.linear(24, 32), r"linear \[24, 32\]"),
        (lambda fp8: fp8.slot(4, expert=True), "4 experts"),
        (lambda fp8: Net(fp8, False)(torch.ones(17, 32), True), "17 tokens"),
    ],
    ids=["sizes", "experts", "tokens"],
)
def test_what_transformer_engine_cannot_multiply_is_refused_in_words(
    world: World, work: Callable[[TransformerEngine], object], words: str
) -> None:
    with pytest.raises(ConfigRefused, match=words):
        work(TransformerEngine(precision(), 2))
