"""What keeps loads even, over the steps of a training whose router prefers some experts (`make soak`)."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from engine import Engine
from launch.trial import trial_steps, write_trial_corpus
from metrics.clock import StepClock
from model.config import ModelConfig, MoEConfig
from optim.config import OptimConfig, ScheduleConfig
from optim.schedule import lr_share
from parallel.config import ParallelConfig
from parallel.device import set_up_machine
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from tests.parity.cases import config_of

STEPS, LAST, OFFSET, EXPERTS = 300, 50, 0.15, 8
MOE = MoEConfig(experts=EXPERTS, top_k=2, ffn=32, score="sigmoid", balance="bias", bias_rate=0.0)
MODEL = ModelConfig(hidden=64, layers=2, heads=4, kv_heads=2, ffn=64, moe=MOE, vocab_size=96, vocab_multiple=4)


class Outcome(NamedTuple):
    """What came of a training."""

    max_vio: float
    """Of the layer that is worst, of loads summed over the last steps."""
    loss: float
    """Mean cross-entropy of these steps, in nats a token."""
    score: float
    """Mean sigmoid score of all experts in the last step: e^(entropy) does not tell how high they are."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_trial_corpus(tmp_path_factory.mktemp("corpus") / "text", 96, tokens=400_000)


def train(moe, corpus):
    """Some 300 steps from the same weights, with scores raised by up to OFFSET in the choice of experts."""
    base = config_of(ParallelConfig(), 1, replace(MODEL, moe=moe), "fp32")
    config = replace(
        base, train=replace(base.train, steps=STEPS, global_batch=16, micro_batch=8, seq_len=64, threads=2),
        optim=OptimConfig(lr=3e-3), lr_schedule=ScheduleConfig(name="cosine", warmup=20),
    )  # fmt: skip
    device = torch.device("cpu")
    machine = set_up_machine("cpu", 0, 2, 1, config.precision, 1.0, "highest", lambda _: None)
    engine = Engine(
        config, config.model, make_mesh(layout_of(config.parallel, 1), 0, device, 60, True), machine, StepClock(device)
    )
    for router in engine.balance.routers.values():
        router.balance += torch.linspace(0.0, OFFSET, EXPERTS)
    loads, loss = torch.zeros(len(engine.balance.layers), EXPERTS, dtype=torch.float64), 0.0
    for number, batch in enumerate(trial_steps(config, corpus, STEPS)):
        lr = 3e-3 * lr_share(config.lr_schedule, number, STEPS)
        sums, _ = engine.step(batch.micro_batches, batch.valid_tokens, lr)
        if number >= STEPS - LAST:
            assert engine.balance.gathered is not None
            loads += engine.balance.gathered[:, :EXPERTS]
            loss += sums.cross_entropy.item() / batch.valid_tokens / LAST
    worst = (loads.amax(1) / loads.mean(1) - 1).max().item()
    return Outcome(worst, loss, score_of(engine))


def score_of(engine):
    """Mean score of unit-norm rows, which is what the norm before the router gives."""
    scores = []
    for router in engine.balance.routers.values():
        x = torch.nn.functional.rms_norm(torch.randn(512, router.weight.shape[1]), (router.weight.shape[1],))
        scores.append((x @ router.weight.detach().float().t()).sigmoid().mean().item())
    return sum(scores) / len(scores)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_biases_even_out_what_an_offset_made_uneven_at_no_cost_to_the_loss(corpus):
    left_alone = train(MOE, corpus)
    biased = train(replace(MOE, bias_rate=1e-3), corpus)
    by_loss = train(replace(MOE, aux_coefficient=1e-2), corpus)
    print(f"\nleft alone {left_alone}\nbias {biased}\nloss {by_loss}")
    assert left_alone.max_vio > 1.0
    assert biased.max_vio < 0.1
    assert math.isclose(biased.loss, by_loss.loss, rel_tol=0.01)
    assert by_loss.score > 0.5 * left_alone.score  # lower scores all round would not have helped it
