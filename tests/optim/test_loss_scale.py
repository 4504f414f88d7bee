"""fp16's loss scale: how it moves, that it rounds nothing, and that it reaches every gradient before fp16 does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from model.build import build
from model.config import ModelConfig, MoEConfig
from model.loss import LossSettings, chunked_loss
from optim.config import OptimConfig
from optim.loss_scale import LARGEST, LossScale
from optim.updater import Updater
from parallel.mesh import ONE_PROCESS
from parallel.precision import LossScaleConfig
from parallel.shards import shards_of
from tests.optim.test_updater import backward, small_model

CPU = torch.device("cpu")
MOE = MoEConfig(experts=4, top_k=2, ffn=24, first_dense=1, balance="sequence", aux_coefficient=0.5, z_loss=0.1)
MODEL = ModelConfig(
    hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, vocab_size=60, vocab_multiple=4, qk_norm=True, loss_chunk=17,
    z_loss=1e-3, moe=MOE,
)  # fmt: skip


def scale_of(**config):
    return LossScale(LossScaleConfig(**config), CPU)


def updater_of(model, config, compute, loss_scale):
    return Updater(shards_of(model, ONE_PROCESS), config, compute, loss_scale=loss_scale)


@given(
    outcomes=st.lists(st.sampled_from([True, True, True, False]), max_size=60), start=st.integers(-2, 30),
    interval=st.integers(1, 5), below=st.integers(0, 4),
)  # fmt: skip
def test_it_moves_as_written(outcomes, start, interval, below):
    """Against whole numbers: the exponent goes down at a skip, and up after so many good steps in a row."""
    ours = scale_of(initial=2.0**start, growth_interval=interval, least=2.0 ** (start - below))
    exponent, good = start, 0
    for fine in outcomes:
        ours.update(torch.tensor(0.0 if fine else 1.0))
        good = good + 1 if fine else 0
        if not fine:
            exponent = max(exponent - 1, start - below)
        elif good == interval:
            good, exponent = 0, max(exponent, min(exponent + 1, 24))
        assert (ours.scale.item(), ours.good.item()) == (2.0**exponent, good)


def test_it_grows_to_its_largest_and_no_further():
    ours = scale_of(growth_interval=1)
    for _ in range(200):
        ours.update(torch.tensor(0.0))
    assert ours.scale.item() == LARGEST
    assert ours.scale.dtype == ours.good.dtype == torch.float32


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_a_power_of_two_changes_no_bit_of_an_update(clip):
    plain, scaled = small_model(), small_model()
    config = OptimConfig(clip=clip)
    one = updater_of(plain, config, torch.float32, None)
    other = updater_of(scaled, config, torch.float32, scale_of(growth_interval=2))
    for step in range(7):
        backward(plain, step, 30.0)
        backward(scaled, step, 30.0 * other.loss_scale.scale)
        outcomes = one.step(1e-2), other.step(1e-2)
        assert outcomes[0].grad_norm == outcomes[1].grad_norm
        assert outcomes[0].loss_scale is None
    assert [each.item() for each in outcomes[1].loss_scale] == [2.0**19, 2.0**19]
    for (name, a, _), (_, b, _) in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_skips_its_step_alone_and_halves_the_scale(bad):
    model = small_model()
    updater = updater_of(model, OptimConfig(), torch.float16, scale_of(initial=1024.0, growth_interval=3))
    seen = []
    for step in range(8):
        before = {n: t.clone() for n, t, _ in updater.tensors()} | {n: p.clone() for n, p in model.named_parameters()}
        backward(model, step, updater.loss_scale.scale)
        if step == 2:
            model[2].weight.grad[1, 1] = bad
        outcome = updater.step(1e-2)
        after = {n: t for n, t, _ in updater.tensors()} | dict(model.named_parameters())
        assert all(torch.equal(before[n], after[n]) for n in before) == (step == 2)
        seen.append((outcome.skipped.item(), *(each.item() for each in outcome.loss_scale)))
    kept, grown = (0.0, 512.0, 512.0), (0.0, 512.0, 1024.0)
    assert seen == [
        (0.0, 1024.0, 1024.0), (0.0, 1024.0, 1024.0), (1.0, 1024.0, 512.0), kept, kept, grown,
        (0.0, 1024.0, 1024.0), (0.0, 1024.0, 1024.0),
    ]  # fmt: skip
    assert updater.updates == 7
    assert {p.dtype for p in model.parameters()} == {torch.float16}


class NoAnswers(TorchDispatchMode):
    """Refuses to read a tensor's value on the host, for which a GPU would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step waits for the device"
        return func(*args, **(kwargs or {}))


def test_no_step_reads_the_scale_on_the_host():
    model, ours = small_model(), scale_of()
    updater = updater_of(model, OptimConfig(), torch.float16, ours)
    for step in range(3):
        backward(model, step, ours.scale)
        if step == 1:
            model[2].weight.grad[1, 1] = float("inf")
        with NoAnswers():
            updater.step(1e-2)
    with pytest.raises(AssertionError, match="waits"), NoAnswers():
        ours.scale.item()


def gradients_of(model, loss_scale=None, dtype=None):
    """Gradients of one micro-batch, and the routers' tallies."""
    model = build(model, 1, CPU, torch.float32)
    model = model if dtype is None else model.to(dtype)
    for router in model.routers.values():
        router.reset_buffers()
    tokens = torch.randint(0, 60, (2 * 24 + 1,), generator=torch.Generator().manual_seed(3))
    positions, borders = torch.arange(24).repeat(2), torch.tensor([0, 24, 48], dtype=torch.int32)
    sums = model(
        tokens[:-1], tokens[1:], positions, borders, 24, documents=True, scale=1 / 64, share=1 / 64,
        loss_scale=loss_scale,
    )  # fmt: skip
    sums.objective.backward()
    tallies = [router.tally.clone() for router in model.routers.values()]
    return {name: p.grad for name, p in model.named_parameters()}, tallies, sums


@pytest.mark.parametrize("exponent", [-3, 16, 24])
def test_every_gradient_is_multiplied_and_what_is_recorded_is_not(exponent):
    """In fp32, where nothing leaves the range: bit for bit, the routers' own losses included."""
    scale = torch.tensor(2.0**exponent)
    plain, tallies, sums = gradients_of(MODEL)
    scaled, other, others = gradients_of(MODEL, scale)
    for name, gradient in plain.items():
        assert torch.equal(gradient, scaled[name] / scale), name
    assert all(torch.equal(a, b) for a, b in zip(tallies, other, strict=True))
    assert torch.equal(sums.objective * scale, others.objective)
    assert torch.equal(sums.cross_entropy, others.cross_entropy) and torch.equal(sums.z_square, others.z_square)


def test_a_routers_gradient_from_its_own_losses_has_the_scale():
    """Without them it is another: the test above would not see a loss that is not attached."""
    with_losses, _, _ = gradients_of(MODEL)
    without, _, _ = gradients_of(replace(MODEL, moe=replace(MOE, aux_coefficient=0.0, z_loss=0.0)))
    name = "layers.1.mlp.router.weight"
    assert (with_losses[name] - without[name]).norm() > 0.1 * with_losses[name].norm()


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, moe=None, bias=True, activation="gelu", window=7)])
def test_fp16_gives_the_gradients_of_fp64_but_for_its_rounding(model):
    """Attention, norms, rotations, MLP, experts and loss: products add up in fp32, and the loss is fp32."""
    exact, _, sums = gradients_of(model, dtype=torch.float64)
    scale = torch.tensor(1024.0)
    ours, _, rounded = gradients_of(model, scale, torch.float16)
    assert rounded.objective.dtype == rounded.cross_entropy.dtype == torch.float32
    assert rounded.cross_entropy.item() == pytest.approx(sums.cross_entropy.item(), rel=2e-4)
    for name, gradient in exact.items():
        error = (ours[name].double() / scale - gradient).norm() / gradient.norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_the_scale_is_in_the_gradients_of_the_logits_before_they_are_rounded():
    """A step of a million tokens: what one of them adds is below fp16's smallest number, unless it is scaled."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator).half().requires_grad_() for n in (64, 128))
    labels, settings = torch.randint(0, 128, (64,), generator=generator), LossSettings(128, 32, 0.0)

    def gradients(dtype, scale, *given):
        made = [each.detach().to(dtype).requires_grad_() for each in given]
        chunked_loss(made[0], made[1], labels, settings, scale)[0].backward()
        return [each.grad.double() for each in made]

    exact = gradients(torch.float64, 2.0**-20, x, weight)
    scaled = gradients(torch.float16, torch.tensor(2.0**-20 * 65536.0), x, weight)
    bare = gradients(torch.float16, 2.0**-20, x, weight)
    for wanted, ours, lost in zip(exact, scaled, bare, strict=True):
        assert (ours / 65536 - wanted).norm() < 2e-3 * wanted.norm()
        assert (lost - wanted).norm() > 2e-2 * wanted.norm()
