"""AdamW with clipping, skipping and fp32 masters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from optim.config import OptimConfig
from optim.updater import Updater, decays, global_norm
from parallel.mesh import ONE_PROCESS
from parallel.shards import shards_of


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4)).to(dtype)


def updater_of(model, config, compute):
    return Updater(shards_of(model, ONE_PROCESS), config, compute)


def master(updater, name):
    return next(tensor for key, tensor, _ in updater.tensors() if key == f"model.{name}")


def backward(model, seed, scale=1.0):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    (model(x.to(next(model.parameters()).dtype)).square().mean() * scale).backward()


def plain_adamw(model, config, lr, steps):
    """The algorithm, element by element (Loshchilov and Hutter, 2019), with a clipped global norm."""
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for step in range(1, steps + 1):
        model.zero_grad()
        backward(model, step, 30.0)
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        share = min(1.0, config.clip / (norm.item() + 1e-6)) if config.clip else 1.0
        with torch.no_grad():
            for p, (m, v) in moments.items():
                g = p.grad * share
                m.lerp_(g, 1 - config.beta1)
                v.lerp_(g * g, 1 - config.beta2)
                hat = (m / (1 - config.beta1**step)) / ((v / (1 - config.beta2**step)).sqrt() + config.eps)
                decay = config.weight_decay if p.dim() > 1 else 0.0
                p.sub_(lr * (hat + decay * p))
    return norm


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
def test_updates_equal_the_published_algorithm(clip):
    config, lr = OptimConfig(clip=clip), 1e-2
    ours, plain = small_model(torch.float64), small_model(torch.float64)
    updater = updater_of(ours, config, torch.float64)
    for step in range(1, 6):
        backward(ours, step, 30.0)
        outcome = updater.step(lr)
    norm = plain_adamw(plain, config, lr, 5)
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=1e-10)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(compute, bad):
    model = small_model()
    updater = updater_of(model, OptimConfig(), compute)
    backward(model, 1)
    updater.step(1e-2)
    before = {n: t.clone() for n, t, _ in updater.tensors()}
    backward(model, 2)
    model[2].weight.grad[1, 1] = bad
    outcome = updater.step(1e-2)
    assert outcome.skipped.item() == 1.0
    assert all(torch.equal(before[n], t) for n, t, _ in updater.tensors())
    assert updater.updates == 1
    backward(model, 3)
    assert updater.step(1e-2).skipped.item() == 0.0
    assert updater.updates == 2


def test_micro_batches_add_up_in_fp32_for_a_bf16_model():
    model = small_model()
    updater = updater_of(model, OptimConfig(clip=0.0), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    weight = model[2].weight
    for _ in range(1000):
        (weight * 1.0).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert (weight.grad == 1000.0).all(), "bf16 would stop at 256"
    updater.clear_gradients()


def test_a_bf16_models_masters_take_steps_too_small_for_bf16():
    model = small_model()
    start = model[0].weight.detach().clone()
    updater = updater_of(model, OptimConfig(weight_decay=0.0), torch.bfloat16)
    for step in range(50):
        backward(model, step)
        updater.step(1e-6)
    moved = (master(updater, "0.weight") - start).abs().max()
    assert 0 < moved < 1e-4
    assert torch.equal(model[0].weight, master(updater, "0.weight").bfloat16())


def test_masters_begin_at_the_unrounded_initial_values():
    model = small_model()
    start = model[0].weight.detach().clone()
    assert torch.equal(master(updater_of(model, OptimConfig(), torch.bfloat16), "0.weight"), start)


def test_loading_a_state_continues_bitwise():
    def fresh():
        model = small_model()
        return model, updater_of(model, OptimConfig(), torch.bfloat16)

    model, updater = fresh()
    for step in range(6):
        if step == 3:
            saved, updates = {n: t.clone() for n, t, _ in updater.tensors()}, updater.updates
        backward(model, step)
        updater.step(1e-2)
    other, again = fresh()
    for name, tensor, _ in again.tensors():
        tensor.copy_(saved[name])
    again.resume(updates)
    for step in range(3, 6):
        backward(other, step)
        again.step(1e-2)
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(updater.tensors(), again.tensors(), strict=True))


def test_decay_falls_on_matrices_and_on_the_embedding_by_option():
    matrix, vector, config = torch.zeros(2, 2), torch.zeros(2), OptimConfig()
    assert decays("layers.0.mlp.up.weight", matrix, config)
    assert not decays("norm.weight", vector, config)
    assert decays("embedding.weight", matrix, config)
    assert not decays("embedding.weight", matrix, replace(config, decay_embeddings=False))
    assert not decays("head.weight", matrix, replace(config, decay_embeddings=False))


def test_the_norm_of_millions_of_elements_is_exact_to_a_millionth():
    ones = [torch.full((16_000_000,), 1e-3), torch.full((3,), 4.0)]
    assert global_norm([(g, 1) for g in ones], everywhere=False)[0].item() == pytest.approx(
        (16.0 + 48.0) ** 0.5, rel=1e-6
    )
    spread = [torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    exact = torch.cat([g.flatten() for g in spread]).double().norm().item()
    assert global_norm([(g, 1) for g in spread], everywhere=False)[0].item() == pytest.approx(exact, rel=1e-6)
