"""Watches the passes of a step that is made again, and notes where on this rank a tensor first is not finite.

Watched are the inputs and outputs of every module, their gradients, the gradient of every parameter, what is sent to
other ranks, and what came from them when it is first used. The first bad sighting decides:

    input of a module           made by the code around it: its parent is at fault
    output of a module          the module is at fault
    gradient of an input        the module that read it is at fault
    gradient of an output       the code around it: the parent
    gradient of a parameter     the parameter
    sent, and none of these     the module at work: what it sent is its own product (a row linear's addend)
    came from another rank      nobody here: that rank, or one before it, has a sighting of its own

Where another rank's tensors lie is known from PyTorch's collectives (operators of the namespace c10d), which a
dispatch mode sees in both passes; autograd's threads inherit it. What lies inside a module may be infinite, or memory
that nothing was written to: masks are, and rooms for products. Only what crosses a border is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from metrics.fault import Numbers

_SENT_AND_RECEIVED: Mapping[str, tuple[int | None, int | None]] = {
    "send": (0, None), "recv_": (None, 0), "recv_any_source_": (None, 0),
    "allreduce_": (0, 0), "allreduce_coalesced_": (0, 0), "broadcast_": (0, 0), "reduce_": (0, 0),
    "_allgather_base_": (1, 0), "allgather_": (1, 0), "allgather_into_tensor_coalesced_": (1, 0),
    "_reduce_scatter_base_": (1, 0), "reduce_scatter_": (1, 0), "reduce_scatter_tensor_coalesced_": (1, 0),
    "alltoall_base_": (1, 0), "alltoall_": (1, 0),
}  # fmt: skip
"""Of c10d's operators: which argument is sent, and which one is filled."""


class Working(NamedTuple):
    """What this rank is at."""

    micro_batch: int
    """Number on this rank."""
    backward: bool
    """Whether in a backward pass."""


@dataclass
class Sighting:
    """A tensor that is not finite."""

    received: bool
    """Whether it came from another rank."""
    working: Working
    """When."""
    module: str
    """Global name of what is at fault; empty: the part of the model itself, outside of its modules."""
    parameter: str | None
    """Global name of the parameter whose gradient it is."""
    numbers: Numbers
    """What it holds."""
    row: tuple[tuple[int, ...], int] | None
    """Its shape and the place in it of the first bad value, counted row by row; None: its rows are no tokens."""
    statistics: dict[str, Numbers] = field(default_factory=dict)
    """Of the module's inputs, weights and outputs."""


@dataclass
class _Point:
    """A tensor between modules, whose gradient is looked at."""

    micro_batch: int
    readers: list[str] = field(default_factory=list)
    """Modules that it is an input of, from the outside in."""
    makers: list[str] = field(default_factory=list)
    """Modules that it is an output of, from the inside out."""


class _Entered(NamedTuple):
    """A module whose forward pass is on."""

    name: str
    module: nn.Module
    inputs: list[Tensor]


def numbers_of(tensor: Tensor) -> Numbers:
    """Count and measure; waits for the device."""
    values = tensor.detach()
    finite = values.isfinite()
    kept = values[finite].double()
    least, largest = (kept.min().item(), kept.max().item()) if kept.numel() else (0.0, 0.0)
    nan = int(values.isnan().sum())
    return Numbers(tuple(values.shape), least, largest, nan, values.numel() - kept.numel() - nan)


def is_bad(tensor: Tensor) -> bool:
    """Whether any value is not finite; waits for the device."""
    return tensor.is_floating_point() and not bool(tensor.detach().isfinite().all())  # else autograd keeps its |x|


class Watcher(TorchDispatchMode):
    """Inside of it, the passes of the given parts of the model are watched; `first` says what was found.

    Args:
        parts: of the model on this rank; the names of their modules are global.
        working: gives what this rank is at.
        heads: of parts that end with the head, the name of its weight and what gives it: no module reads it.
        waiting: gives the lists of weights whose gradients are put off, each with what makes it.
    """

    def __init__(
        self, parts: Sequence[nn.Module], working: Callable[[], Working],
        heads: Mapping[Any, tuple[str, Callable[[], Tensor]]] | None = None,
        waiting: Callable[[], Iterable[list[Any]]] = tuple,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts, self.working, self.heads, self.waiting = parts, working, heads or {}, waiting
        self.first: Sighting | None = None
        self._stack: list[_Entered] = []
        self._backward_in = ""
        self._last_gradient: Tensor | None = None
        self._looking = False
        self._points = WeakTensorKeyDictionary()
        self._parameters: dict[int, str] = {}
        self._owners: dict[str, nn.Module] = {}
        self._received: dict[int, tuple[StorageWeakRef, list[tuple[int, int]]]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Watcher:
        for part in self.parts:
            for name, module in part.named_modules():
                self._owners[name] = module
                before = module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
                self._hooks.callback(before.remove)
                self._hooks.callback(module.register_forward_hook(partial(self._after, name)).remove)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._hooks.close()
        self._stack.clear()
        self._received.clear()
        self._last_gradient = None

    # Forward: modules.

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.working().backward:  # made again; the first pass was looked at
            return
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        for each in inputs:
            self._look(each, self._stack[-1].name if self._stack else "", came=not self._stack)
            self._point(each, name, self._reads)
        self._stack.append(_Entered(name, module, inputs))
        for key, parameter in module.named_parameters(recurse=False):
            self._watch_parameter(f"{name}.{key}" if name else key, parameter)
        if module in self.heads:
            key, weight = self.heads[module]
            self._watch_parameter(key, weight())

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.working().backward:
            return
        for each in _tensors([output]):
            self._look(each, name)
            self._point(each, name, self._makes)
        if self._stack and self._stack[-1].module is module:
            self._stack.pop()

    # Backward: gradients of what passed between modules, and of parameters.

    @staticmethod
    def _reads(point: _Point, name: str) -> None:
        point.readers.append(name)

    @staticmethod
    def _makes(point: _Point, name: str) -> None:
        point.makers.append(name)

    def _point(self, tensor: Tensor, name: str, role: Callable[[_Point, str], None]) -> None:
        """Note a module's part in a tensor, whose gradient is looked at once it is there."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return
        point = self._points.get(tensor)
        if point is None:
            point = self._points[tensor] = _Point(self.working().micro_batch)
            tensor.register_hook(partial(self._gradient_at, point))
        role(point, name)

    def _gradient_at(self, point: _Point, gradient: Tensor) -> None:
        self._wrap_waiting()
        outside = _parent(point.makers[-1] if point.makers else point.readers[0])
        blamed = point.readers[-1] if point.readers else outside
        self._look(gradient, blamed)
        self._backward_in = point.makers[0] if point.makers else outside
        self._last_gradient = gradient

    def _watch_parameter(self, name: str, parameter: Tensor) -> None:
        if id(parameter) in self._parameters or not (parameter.requires_grad and torch.is_grad_enabled()):
            return
        self._parameters[id(parameter)] = name
        self._hooks.callback(parameter.register_hook(partial(self._parameter_gradient, name)).remove)

    def _parameter_gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None:  # put off: it is looked at when it is made
            return
        self._look(gradient, name.rpartition(".")[0], parameter=name)

    def _wrap_waiting(self) -> None:
        """Have gradients that are put off looked at when they are made."""
        for products in self.waiting():
            for place, (weight, make) in enumerate(products):
                if not isinstance(make, partial) or make.func != self._made:
                    products[place] = weight, partial(self._made, self._parameters.get(id(weight), ""), make)

    def _made(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        gradient = make()
        self._look(gradient, name.rpartition(".")[0], parameter=name)
        return gradient

    # Between ranks: everything that is sent, and what came when it is first used.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._looking or self.first is not None:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if self._received and not func.is_view:
            for each in _tensors([*args, *kwargs.values()]):
                if self._came(each):
                    self._look(each, "", came=True)
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        sent, filled = _SENT_AND_RECEIVED.get(func._schema.name.partition("::")[2], (None, None))
        if sent is not None:
            for each in _tensors([args[sent]]):
                self._look(each, self._at_work(), sent=True)
        result = func(*args, **kwargs)
        if filled is not None:
            for each in _tensors([args[filled]]):
                self._remember(each)
        return result

    def _at_work(self) -> str:
        """The module whose code runs."""
        if self.working().backward:
            return self._backward_in
        return self._stack[-1].name if self._stack else ""

    def _remember(self, tensor: Tensor) -> None:
        """Another rank's values will lie where the tensor lies."""
        storage = tensor.untyped_storage()
        _, spans = self._received.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        spans.append(_span(tensor))

    def _came(self, tensor: Tensor) -> bool:
        """Whether any of it came from another rank. (A weak reference keeps a storage's address from being reused.)"""
        if not self._received or tensor.device.type == "meta":
            return False
        _, spans = self._received.get(tensor.untyped_storage()._cdata, (None, ()))
        begin, end = _span(tensor)
        return any(begin < stop and start < end for start, stop in spans)

    # What is found.

    def _look(
        self, tensor: Tensor, module: str, *, parameter: str | None = None, came: bool = False, sent: bool = False
    ) -> None:
        """Note the tensor if it is bad and nothing else was before."""
        if self._looking:
            return
        self._looking = True
        try:
            if self.first is None:
                if self._bad(tensor, module, sent or came):
                    self.first = self._sighting(tensor, module, parameter, came or self._came(tensor))
            elif self.first.row is None and self._continues() and is_bad(tensor):
                self.first.row = _row(tensor, module)
        finally:
            self._looking = False

    def _bad(self, tensor: Tensor, module: str, between_ranks: bool) -> bool:
        """A rank whose share of the vocabulary is padding sends -inf for its logits; elsewhere no -inf is sent."""
        if between_ranks and not module and not self.working().backward:
            return tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any())
        return is_bad(tensor)

    def _continues(self) -> bool:
        """Whether the first sighting's rows are still unknown, and this is the same pass of the same micro-batch."""
        first = self.first
        return first is not None and not first.received and not first.parameter and first.working == self.working()

    def _sighting(self, tensor: Tensor, module: str, parameter: str | None, received: bool) -> Sighting:
        row = None if received or parameter else _row(tensor, module)
        found = Sighting(received, self.working(), module, parameter, numbers_of(tensor), row)
        if not received:
            found.statistics = dict(self._statistics(tensor, module))
        return found

    def _statistics(self, tensor: Tensor, module: str) -> Iterator[tuple[str, Numbers]]:
        backward = self.working().backward
        entered = next((each for each in reversed(self._stack) if each.name == module), None)
        for number, each in enumerate(entered.inputs if entered and not backward else ()):
            yield f"input {number}" if number else "input", numbers_of(each)
        if backward and self._last_gradient is not None:
            yield "gradient before", numbers_of(self._last_gradient)
        owner = self._owners.get(module)
        for name, weight in owner.named_parameters(recurse=False) if owner is not None else ():
            if weight.numel() and type(weight) is nn.Parameter:
                yield name, numbers_of(weight)
        yield "gradient" if backward else "output", numbers_of(tensor)


def _parent(name: str) -> str:
    """The module that a module is in, whose code calls it: dictionaries of modules call none."""
    outer = name.rpartition(".")[0]
    return outer.rpartition(".")[0] if outer.rpartition(".")[2] == "layers" else outer


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The plain tensors among values, also in lists and tuples."""
    for each in values:
        if type(each) in (Tensor, nn.Parameter):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage that a tensor lies in."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, width = int(tensor.storage_offset()), tensor.element_size()
    return begin * width, (begin + last + 1) * width if tensor.numel() else begin * width


def _row(tensor: Tensor, module: str) -> tuple[tuple[int, ...], int] | None:
    """Shape, and place of the first value that is not finite; None for rows in the order of experts."""
    if module.endswith(".experts") or tensor.dim() < 2:
        return None
    return tuple(tensor.shape), int((~tensor.isfinite()).flatten().int().argmax())
