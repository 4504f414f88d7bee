"""FP8's state machine against one written down on paper: plain lists, one linear after the other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parallel.fp8.formats import FORMATS
from parallel.fp8.state import FP8, KINDS, Kind, Table, slots_of
from parallel.mesh import ALONE
from parallel.precision import FP8Config, PrecisionConfig
from parallel.recompute import recomputed
from parallel.tensor import Linears

SIZES = (32, 48, 16)


class Net(nn.Module):
    """Two linears, as a block has them."""

    def __init__(self, fp8: FP8, again: bool) -> None:
        super().__init__()
        linears = Linears(ALONE, None, fp8)
        self.one = linears.column(SIZES[0], SIZES[1], False, None)
        self.two = linears.row(SIZES[1], SIZES[2], False, None)
        self.fp8, self.again, self.seen = fp8, again, dict[str, float]()
        torch.manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)

    def see(self, key: str, t: Tensor) -> Tensor:
        self.seen[key] = t.detach().abs().max().item()
        if t.requires_grad and key.startswith("y"):
            t.register_hook(lambda g: self.seen.__setitem__(f"g{key[1:]}", g.abs().max().item()))
        return t

    def body(self, x: Tensor) -> Tensor:
        y = self.see("y0", self.one(self.see("x0", x)))
        return self.see("y1", self.two(self.see("x1", y.relu())))

    def forward(self, x: Tensor, first: bool, keeps: bool = True) -> Tensor:
        with self.fp8.forward(first, keeps):
            return recomputed(self.body, x, fp8=self.fp8) if self.again else self.body(x)


@dataclass
class OnPaper:
    """Histories and scales of one tensor."""

    largest: float
    config: FP8Config
    history: list[float] = field(default_factory=list)
    scale: np.float32 = field(default_factory=lambda: np.float32(1.0))

    def __post_init__(self) -> None:
        self.history = [0.0] * self.config.history

    def see(self, amax: float) -> None:
        self.history[0] = max(self.history[0], amax)

    def close(self) -> None:
        amax = np.float32(self.history[0] if self.config.amax == "most_recent" else max(self.history))
        if amax > 0:
            self.scale = np.float32(self.largest * 2.0**-self.config.margin) / amax
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = 0.0


CASES = {
    "as it comes": FP8Config(history=4),
    "no history": FP8Config(history=1),
    "the most recent, with room": FP8Config(history=3, amax="most_recent", margin=2),
    "all e4m3": FP8Config(history=2, format="e4m3", margin=-1),
}


def train(config: FP8Config, *, again: bool = False, keeps: bool = True) -> list[str]:
    """Two steps of three micro-batches with an evaluation between; where the tables differ from paper."""
    fp8 = FP8(PrecisionConfig("fp8_delayed", fp8=config), layers=1)
    net = Net(fp8, again)
    fp8.allocate(torch.device("cpu"))
    paper = {
        (row, kind): OnPaper(FORMATS["e5m2" if kind == "g" and config.format == "hybrid" else "e4m3"].largest, config)
        for row in range(2) for kind in KINDS
    }  # fmt: skip
    generator, faults = torch.Generator().manual_seed(1), list[str]()
    for step in range(2):
        for number, size in enumerate((1.0, 30.0, 1e-3)):
            x = (size * torch.randn(24, SIZES[0], generator=generator)).requires_grad_()
            net(x, number == 0, keeps).square().sum().backward()
            weights = [w.abs().max().item() for w in (net.one.weight, net.two.weight)]
            for (row, kind), own in paper.items():
                if kind == "w" and number == 0:
                    own.see(weights[row])
                elif kind != "w":
                    own.see(net.seen[f"{kind}{row}"])
                own.close()
            faults += [f"step {step}, micro-batch {number}: {each}" for each in differences(net, paper)]
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(1.5)
            net(1e4 * torch.randn(24, SIZES[0], generator=generator), False, keeps)
    return faults


def differences(net: Net, paper: dict[tuple[int, Kind], OnPaper]) -> list[str]:
    found = []
    for row, (name, slot) in enumerate(slots_of(net)):
        state = slot.state()
        for column, kind in enumerate(KINDS):
            own = paper[row, kind]
            if state["history"][column].tolist() != [np.float32(v) for v in own.history]:
                found.append(f"history of {kind} of {name}: {state['history'][column].tolist()}, not {own.history}")
            if state["scale"][column].item() != own.scale:
                found.append(f"scale of {kind} of {name}: {state['scale'][column].item()}, not {own.scale}")
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_histories_and_scales_are_those_on_paper(config, again, keeps):
    assert train(config, again=again, keeps=keeps) == []


def test_a_missed_roll_is_found():
    with patch.object(torch.Tensor, "roll", lambda self, *_: self):
        assert any("history" in each for each in train(CASES["as it comes"]))


def test_a_recomputation_that_updates_histories_is_found():
    def leaking(fp8):
        return nullcontext(), records(fp8)

    with patch.object(FP8, "recomputing", leaking):
        faults = train(CASES["as it comes"], again=True)
    assert any("history of x" in each for each in faults)


class records:  # noqa: N801
    """A second pass that leaves its maxima in the table as the first one did."""

    def __init__(self, fp8):
        self.fp8 = fp8

    def __enter__(self):
        self.fp8._records = self.fp8.active = True

    def __exit__(self, *_):
        self.fp8._records = self.fp8.active = False


def test_a_backward_pass_that_never_closes_is_found():
    with patch.object(FP8, "opens", lambda _: False):
        assert any("of g" in each for each in train(CASES["as it comes"]))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_part_made_again_gives_the_same_gradients_bit_for_bit(recipe, keeps):
    def gradients(again):
        fp8 = FP8(PrecisionConfig(recipe, fp8=FP8Config(history=3)), layers=1)
        net = Net(fp8, again)
        fp8.allocate(torch.device("cpu"))
        for number in range(3):
            x = torch.randn(24, SIZES[0], generator=torch.Generator().manual_seed(number))
            net(x.requires_grad_(), number == 0, keeps).square().sum().backward()
        return [w.grad for w in net.parameters()]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_outside_of_a_pass_products_are_those_of_the_weights_as_they_are(recipe):
    """A sample of text after the last step; what is kept of the weights is from before their last change."""
    fp8 = FP8(PrecisionConfig(recipe, fp8=FP8Config(history=3)), layers=1)
    net = Net(fp8, False)
    fp8.allocate(torch.device("cpu"))
    net(torch.randn(16, SIZES[0]), True).sum().backward()
    before = fp8.tables[False].history.clone()
    x = torch.randn(3, SIZES[0])
    with torch.no_grad():
        net.one.weight.mul_(2.0)
        assert torch.equal(net.one(x), x @ net.one.weight.t())
    assert torch.equal(fp8.tables[False].history, before)


def test_a_value_that_is_no_number_does_not_stay_in_the_history():
    fp8 = FP8(PrecisionConfig("fp8_delayed", fp8=FP8Config(history=4)), layers=1)
    net = Net(fp8, False)
    fp8.allocate(torch.device("cpu"))
    for fill in (1.0, float("nan"), 2.0):
        net(torch.full((16, SIZES[0]), fill), True)
    scales = dict(slots_of(net))["one.weight"].state()["scale"]
    assert scales[0] == np.float32(448.0) / np.float32(2.0)


def test_blocks_at_either_end_may_stay_in_bf16():
    fp8 = FP8(PrecisionConfig("fp8_current", fp8=FP8Config(first_bf16=1, last_bf16=2, mlp=False)), layers=6)
    assert [fp8.covers("attention", n) for n in range(6)] == [False, True, True, True, False, False]
    assert not any(fp8.covers("mlp", n) for n in range(6))


def test_a_table_without_rows_has_nothing_to_close():
    table = Table(ALONE)
    table.allocate(4, torch.device("cpu"))
    table.close(slice(0, 2), [FORMATS["e4m3"]] * 2, 0, False)
    assert table.history.shape == (0, 3, 4)
