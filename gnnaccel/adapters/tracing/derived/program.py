"""What a ``forward`` makes of its list of edges, and of other arguments with rows for edges, by
torch alone: lists with self loops or in both directions, masks, degrees, norms.

None of it says anything about features of nodes. It runs natively, in each call; what is made of
whole numbers alone is kept for as long as these are as they were, so that structures of lists are.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.tracing.rows.standins import Unseen
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.tensor_ref import TensorRef

#: the name among the arguments of a call under which results are
DERIVED = "<derived>"
_KEPT = 4


class Place(int):
    """The place of an earlier result, among arguments of a step."""

    def __repr__(self) -> str:
        return f"place {int(self)}"


class _Marker:
    """What a call tells: how many nodes there are, and where its tensors are."""


NODES, HERE = _Marker(), _Marker()


class Step(NamedTuple):
    """One function with its arguments; an argument of the call, if there is none. ``writes``: the
    place of the result that it writes over; ``answer``: what the first argument has to be, of a
    question; ``changes``: whether it is an argument that is not of whole numbers."""

    function: Callable | None
    args: tuple = ()
    kwargs: dict = {}
    writes: int | None = None
    answer: Any = None
    changes: bool = False


class Program:
    """Steps in the order of the code, with their ``values`` in the call that is traced, whose
    arguments are ``given``, over so many ``nodes``."""

    def __init__(self, given: dict[str, Any], nodes: int, device: torch.device):
        self.steps: list[Step] = []
        self.values: list[Any] = []
        self.read: set[int] = set()  #: places that something else is made of later
        self._call = given, nodes, device
        self._fixed: frozenset[int] | None = None
        self._kept: list[tuple[list[tuple[tuple, TensorRef]], tuple, dict[int, Any]]] = []

    def argument(self, name: str, part: int | None = None) -> int:
        """The place of an argument, or of a part of it."""
        value = _argument(self._call[0], name, part)
        return self._add(Step(None, (name, part), changes=value.is_floating_point()), value)

    def made(self, function: Callable, args: tuple, kwargs: dict, writes: int | None = None) -> int:
        """The place of what a function gives."""
        if not torch.is_grad_enabled():
            function = torch.no_grad()(function)
        step = Step(function, args, kwargs, writes)
        if writes is None:
            for at in range(len(self.steps)):
                if self._is_same(at, step):
                    return at
        else:
            self._check_alone(writes)
        with torch.no_grad():
            return self._add(step, _done(step, self.values, self._call[1:]))

    def asked(self, place: int) -> Any:
        """The number or truth value of a step, which a later call has to have, too."""
        answer = self.values[place]
        self._add(Step(None, (Place(place),), answer=(answer,)), None)
        return answer

    def _add(self, step: Step, value: Any) -> int:
        self.steps.append(step)
        self.values.append(value)
        return len(self.steps) - 1

    def _is_same(self, at: int, step: Step) -> bool:
        """Whether an earlier step picks the same ids."""
        earlier, value = self.steps[at], self.values[at]
        return (type(value) is Tensor and value.dtype is torch.int64
                and earlier.writes is None and step.function is earlier.function
                and any(type(one) is Place for one in step.args) and not any(
                    other.writes is not None for other in self.steps)
                and _text(step) == _text(earlier))

    def _check_alone(self, at: int) -> None:
        """Unseen for what may not be written over: an argument, what others share memory with, or
        what was read before."""
        mine = self.values[at]
        memory = mine.untyped_storage().data_ptr()
        for place, value in enumerate(self.values):
            if value is mine:
                step = self.steps[place]
                if step.function is None or place in self.read:
                    raise Unseen
            elif any(one.untyped_storage().data_ptr() == memory for one in _tensors(value)):
                raise Unseen

    # --- calls ------------------------------------------------------------------------------------

    def run(self, values: dict[str, Any], nodes: int, device: torch.device) -> list[Any] | None:
        """The results of all steps in a call; None where a question has another answer."""
        self.values = []  # those of the call that was traced are asked for no more
        self._call = {}, 0, device
        call = nodes, device
        fixed, results = self._found(values, call), list[Any]()
        for at, step in enumerate(self.steps):
            if at in fixed:
                results.append(fixed[at])
            elif step.answer is not None:
                if results[step.args[0]] != step.answer[0]:
                    return None
                results.append(None)
            elif step.function is None:
                results.append(_argument(values, *step.args))
            else:
                results.append(_done(step, results, call))
        self._keep(values, call, results)
        return results

    def is_kept(self, at: int) -> bool:
        """Whether a result may be kept for other calls, so that nobody may write to it."""
        return at in self._settled()

    def _settled(self) -> frozenset[int]:
        """The places of the steps that are made of whole numbers alone."""
        if self._fixed is None:
            self._fixed = frozenset(range(len(self.steps))) - _changing(self.steps)
        return self._fixed

    def _found(self, values: dict[str, Any], call: tuple) -> dict[int, Any]:
        """Results that are kept for such arguments."""
        if capture.capturing():
            return {}
        for refs, of_call, results in self._kept:
            if of_call == call and all([ref.unmoved(_argument(values, *one)) for one, ref in refs]):
                return results
        return {}

    def _keep(self, values: dict[str, Any], call: tuple, results: list[Any]) -> None:
        settled = self._settled()
        inputs = {step.args for step in map(self.steps.__getitem__, settled)
                  if step.function is None and step.answer is None}
        tensors = {one: _argument(values, *one) for one in inputs}
        if not settled or capture.capturing() or torch.is_inference_mode_enabled() or any(
            one.is_inference() for one in tensors.values()) or self._found(values, call):
            return
        refs = [(one, TensorRef(tensor)) for one, tensor in tensors.items()]
        alive = [one for one in self._kept if all([ref() is not None for _, ref in one[0]])]
        self._kept[:] = [(refs, call, {at: results[at] for at in settled}), *alive][:_KEPT]


def _argument(values: dict[str, Any], name: str, part: int | None) -> Any:
    """An argument of a call, or a part of it."""
    return values[name] if part is None else values[name][part]


def _done(step: Step, results: list[Any], call: tuple) -> Any:
    """The result of a step."""
    assert step.function is not None
    args = [_filled(one, results, call) for one in step.args]
    return step.function(*args, **{key: _filled(one, results, call)
                                   for key, one in step.kwargs.items()})


def _filled(value: Any, results: list[Any], call: tuple) -> Any:
    kind = type(value)
    if kind is Place:
        return results[value]
    if kind is _Marker:
        return call[value is HERE]
    if kind is tuple or kind is list:
        return kind([_filled(one, results, call) for one in value])
    if kind is slice:
        return slice(*[_filled(one, results, call) for one in (value.start, value.stop,
                                                               value.step)])
    return value


def _places(value: Any) -> Iterator[int]:
    if type(value) is Place:
        yield value
    elif type(value) in (tuple, list):
        for one in value:
            yield from _places(one)
    elif type(value) is slice:
        yield from _places((value.start, value.stop, value.step))
    elif type(value) is dict:
        yield from _places(tuple(value.values()))


def _changing(steps: list[Step]) -> set[int]:
    """The places of the steps that are made of more than whole numbers, or written over by such."""
    found, before = {at for at, step in enumerate(steps) if step.changes}, -1
    while len(found) != before:
        before = len(found)
        for at, step in enumerate(steps):
            if not found.isdisjoint(_places((step.args, step.kwargs))):
                found.add(at)
            if step.writes is not None and (at in found or step.writes in found):
                found |= {at, step.writes}
    return found


def _text(step: Step) -> str:
    return repr((step.args, step.kwargs))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
