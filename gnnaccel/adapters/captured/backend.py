"""``torch.compile(model, backend="gnnaccel")``: graphs traced by Dynamo, run as they are and then
replayed as CUDA graphs, without Inductor and Triton.

Dynamo guards on all that the traced code reads, and makes parameters arguments of the graph that it
gives. Only the tensors themselves are compared here.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.captured import counts, graphs, modules, threads
from gnnaccel.dispatch.graph.ordered_weights import is_of_the_graph
from gnnaccel.dispatch.graph.tensor_ref import TensorRef, unversioned
from gnnaccel.dispatch.plan import compiling

_CALLS = 2  # calls alike before one is captured
_FORMS = 8  # forms of arguments that are kept


def backend(traced: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
    """The function that runs ``traced``, a graph of Dynamo's; ``inputs``: of its first call."""
    return Region(traced)


class Region:
    """A piece of a compiled model. ``why``: the reason why calls are not captured; "" for none."""

    def __init__(self, traced: torch.fx.GraphModule) -> None:
        self._run = traced.forward
        self._forms: dict[tuple, _Form] = {}
        self.why = ""

    def __call__(self, *given: Any) -> Any:
        tensors = [one for one in given if isinstance(one, Tensor)]
        if (self.why or not tensors or not modules.possible() or unversioned(tensors)
            or torch.is_autocast_enabled(tensors[0].device.type)):
            return self._run(*given)
        form = self._form(given, tensors)
        if form.captured is not None and form.repeats(tensors):
            if form.captured.free(tensors):
                counts.counted("torch.compile")
                return form.captured.replay(tensors)
            return self._run(*given)
        threads.called()
        if not form.again(tensors) or form.calls <= _CALLS or compiling.waiting():
            return self._run(*given)
        device = tensors[0].device
        if device.type not in modules.DEVICES or any(t.device != device for t in tensors):
            self.why = "its arguments are not on one GPU"
        else:
            try:
                form.captured = graphs.Captured(self._work(given, tensors, form))
                return form.captured.replay(tensors)
            except graphs.Refused as problem:
                self.why = str(problem)
        counts.told("torch.compile", self.why)
        return self._run(*given)

    def _form(self, given: tuple, tensors: list[Tensor]) -> _Form:
        key = (torch.is_grad_enabled(), *[
            (one.shape, one.stride(), one.dtype, one.requires_grad) if isinstance(one, Tensor)
            else one for one in given])
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _FORMS:
                self._forms.pop(next(iter(self._forms)))
            form = self._forms[key] = _Form(len(tensors))
        return form

    def _work(self, given: tuple, tensors: list[Tensor], form: _Form) -> graphs.Work:
        plain = [None if isinstance(one, Tensor) else one for one in given]
        places = [i for i, one in enumerate(given) if isinstance(one, Tensor)]

        def call(found: list[Tensor]) -> Any:
            arguments = list(plain)
            for i, t in zip(places, found):
                arguments[i] = t
            return self._run(*arguments)

        def aside(found: list[Tensor], others: dict[Tensor, Tensor]) -> Any:
            return call(found)  # all that it reads are arguments

        # buffers are arguments like others, and not all writes to them are counted
        buffers = [t for t, copied in zip(tensors, form.copied)
                   if not (copied or t.requires_grad)
                   and (t.is_floating_point() or not t.dim())]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        fixed = [t for t, copied in zip(tensors, form.copied)
                 if not copied and t.is_floating_point()]
        return graphs.Work(call, call, aside, tensors, form.copied, [], [], buffers, fixed, [],
                           tensors[0].device, wanted)


class _Form:
    """Calls with arguments of one form. ``copied``: those that differ from call to call."""

    def __init__(self, count: int) -> None:
        self._refs: list[TensorRef] = []
        self.copied = [False] * count
        self.calls = 0
        self.captured: graphs.Captured | None = None

    def repeats(self, tensors: list[Tensor]) -> bool:
        """Whether the tensors are those of the last call, or may be copied into these."""
        return all(copied or _stays(ref, t)
                   for ref, t, copied in zip(self._refs, tensors, self.copied))

    def again(self, tensors: list[Tensor]) -> bool:
        """Whether this call has the graph of the last one. Notes the call for the next one."""
        before, self._refs = self._refs, [TensorRef(t) for t in tensors]
        self.captured = None
        alike = bool(before)
        for i, (ref, t) in enumerate(zip(before, tensors)):
            if not self.copied[i] and not _stays(ref, t):
                self.copied[i] = t.is_floating_point() and not isinstance(t, torch.nn.Parameter)
                alike = alike and self.copied[i]
        self.calls = self.calls + 1 if alike else 0
        return alike


def _stays(ref: TensorRef, tensor: Tensor) -> bool:
    """Whether this is the tensor, where it was; unwritten, if it may be a graph or its weights."""
    return (ref() is tensor and ref.pointer == tensor.data_ptr()
            and (ref.version == tensor._version or not tensor.dim()
                 or tensor.is_floating_point() and not is_of_the_graph(tensor)))
