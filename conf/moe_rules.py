"""Rules of a mixture of experts, and what in one depends on the layout."""

from __future__ import annotations

from math import lcm

from conf.cures import divisors, just, multiples, near
from conf.cut import Cut, Fault, Rule, Stream
from conf.problem import Problem, show
from model.config import ModelConfig, MoEConfig

_ROW = 8
"""Features of 16 bytes in bf16: rows of grouped products begin at multiples of them."""
_FURTHER = 512
"""Experts more than now that are tried."""


def _chosen(cut: Cut) -> Fault | None:
    moe = cut.moe
    if moe is None or moe.top_k <= moe.experts:
        return None
    rule = f"a token cannot use more than the model.moe.experts={moe.experts} of a layer"

    def cures() -> list[Stream]:
        return [*near("model.moe.top_k", moe.top_k, range(1, moe.experts + 1)), *_more_experts(cut, moe, moe.top_k)]

    return Fault("model.moe.top_k", rule, ("model.moe.experts",), cures)


def _more_experts(cut: Cut, moe: MoEConfig, least: int) -> list[Stream]:
    """At least so many experts, which the groups and the ranks divide."""
    step = lcm(moe.groups, cut.ep)
    first = -(-least // step) * step
    return [Stream(near("model.moe.experts", moe.experts, range(first, first + step * _FURTHER, step))[1].cures)]


def _groups(cut: Cut) -> Fault | None:
    moe = cut.moe
    if moe is None or moe.groups == 1 or (moe.experts % moe.groups == 0 and moe.experts >= 2 * moe.groups):
        return None
    if moe.experts % moe.groups:
        rule = f"must divide model.moe.experts={moe.experts}: groups are of equal size"
    else:
        rule = f"a group needs 2 experts at least, since its two best rank it, but model.moe.experts={moe.experts}"

    def cures() -> list[Stream]:
        fitting = [count for count in divisors(moe.experts) if count == 1 or 2 * count <= moe.experts]
        more = _more_experts(cut, moe, max(moe.experts, 2 * moe.groups))
        return [*near("model.moe.groups", moe.groups, fitting), *more]

    return Fault("model.moe.groups", rule, ("model.moe.experts",), cures)


def _groups_chosen(cut: Cut) -> Fault | None:
    moe = cut.moe
    if moe is None or moe.groups_chosen <= moe.groups:
        return None
    rule = f"a token cannot use more than the model.moe.groups={moe.groups}"

    def cures() -> list[Stream]:
        more = near("model.moe.groups", moe.groups, [d for d in divisors(moe.experts) if d >= moe.groups_chosen])
        return [just("model.moe.groups_chosen", moe.groups), *more]

    return Fault("model.moe.groups_chosen", rule, ("model.moe.groups",), cures)


def _chosen_of_groups(cut: Cut) -> Fault | None:
    moe = cut.moe
    if moe is None or moe.groups == 1 or moe.groups_chosen > moe.groups or moe.experts % moe.groups:
        return None
    size = moe.experts // moe.groups
    if moe.top_k <= moe.groups_chosen * size or moe.top_k > moe.experts:
        return None
    rule = (
        f"the groups of a token, model.moe.groups_chosen={moe.groups_chosen} of model.moe.groups={moe.groups}, have "
        f"{moe.groups_chosen} * {size} = {moe.groups_chosen * size} experts together"
    )

    def cures() -> list[Stream]:
        fewer = near("model.moe.top_k", moe.top_k, [moe.groups_chosen * size])
        more = near("model.moe.groups_chosen", moe.groups_chosen, range(1, moe.groups + 1))
        return [*fewer, *more, *near("model.moe.groups", moe.groups, divisors(moe.experts))]

    also = ("model.moe.experts", "model.moe.groups", "model.moe.groups_chosen")
    return Fault("model.moe.top_k", rule, also, cures)


def _dense_blocks(cut: Cut) -> Fault | None:
    moe, layers = cut.moe, cut.config.model.layers
    if moe is None or moe.first_dense < layers:
        return None
    rule = f"leaves no block with experts: model.layers={layers}"

    def cures() -> list[Stream]:
        deeper = range(moe.first_dense + 1, moe.first_dense + 1 + _FURTHER)
        return [just("model.moe.first_dense", layers - 1), *near("model.layers", layers, deeper)]

    return Fault("model.moe.first_dense", rule, ("model.layers",), cures)


def _idle_coefficient(cut: Cut) -> Fault | None:
    if cut.moe is None or cut.moe.balance != "none" or cut.moe.aux_coefficient is None:
        return None
    rule = "weighs a loss of balance, but model.moe.balance=none"
    cures = [just("model.moe.aux_coefficient", None), just("model.moe.balance", "sequence")]
    return Fault("model.moe.aux_coefficient", rule, ("model.moe.balance",), lambda: cures)


def _idle_rate(cut: Cut) -> Fault | None:
    usual = MoEConfig().bias_rate
    if cut.moe is None or cut.moe.balance == "bias" or cut.moe.bias_rate == usual:
        return None
    rule = f"says how fast biases balance the experts, but model.moe.balance={cut.moe.balance}"
    cures = [just("model.moe.bias_rate", usual), just("model.moe.balance", "bias")]
    return Fault("model.moe.bias_rate", rule, ("model.moe.balance",), lambda: cures)


def _constant_weight(cut: Cut) -> Fault | None:
    if cut.moe is None or cut.moe.top_k > 1 or not cut.moe.renormalize:
        return None
    rule = "the weight of a token's only expert (model.moe.top_k=1) is always 1 then, and the router learns nothing"
    cures = [just("model.moe.renormalize", False), *near("model.moe.top_k", 1, range(2, cut.moe.experts + 1))]
    return Fault("model.moe.renormalize", rule, ("model.moe.top_k",), lambda: cures)


def _biases(cut: Cut) -> Fault | None:
    if cut.moe is None or not cut.config.model.bias:
        return None
    rule = "experts have no biases, and a model has them in all of its linears or in none"
    cures = [just("model.bias", False), just("model.moe", None)]
    return Fault("model.bias", rule, ("model.moe",), lambda: cures)


def _rows(key: str) -> Rule:
    """The rule that rows of grouped products are whole pieces of 16 bytes in bf16."""

    def rule(cut: Cut) -> Fault | None:
        """Whether a width is a multiple of 8."""
        if cut.moe is None or cut.value(key) % _ROW == 0:
            return None
        width, model = cut.value(key), cut.config.model
        heads = key == "model.hidden" and model.head_dim is None
        step = lcm(_ROW, 2 * model.heads) if heads else _ROW
        words = f"must be a multiple of {_ROW}: grouped products of experts read rows of 16 bytes in bf16"
        also = ("model.moe", "model.heads", "model.head_dim") if heads else ("model.moe",)
        return Fault(key, words, also, lambda: near(key, width, multiples(width, step) or [step]))

    return rule


MOE_RULES: tuple[Rule, ...] = (
    _chosen, _groups, _groups_chosen, _chosen_of_groups, _dense_blocks, _idle_coefficient, _idle_rate,
    _constant_weight, _biases, _rows("model.hidden"), _rows("model.moe.ffn"),
)  # fmt: skip
"""Rules of the model; they stand among those of the cut, so that a cure of one breaks none of the others."""


def layout_dependent_settings(model: ModelConfig) -> list[Problem]:
    """Settings whose sums are over a rank's micro-batch: another layout is another training, by design."""
    moe, found = model.moe, []
    if moe is not None and moe.balance == "batch":
        rule = "the balance loss of a micro-batch on a rank depends on train.micro_batch and on the layout"
        fix = "write model.moe.balance=sequence or model.moe.balance=bias"
        found.append(Problem("model.moe.balance", "batch", rule, fix))
    if moe is not None and moe.capacity_factor is not None:
        rule = "which tokens an expert drops depends on the others in a micro-batch on a rank, so on the layout"
        fix = "write model.moe.capacity_factor=null"
        found.append(Problem("model.moe.capacity_factor", show(moe.capacity_factor), rule, fix))
    return found
