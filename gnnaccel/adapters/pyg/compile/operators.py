"""The operators of compiled models.

``gnnaccel::layer(call, x, more, rows, width)`` is a layer's call: ``call`` its text
(`standins.Call`), ``x`` and ``more`` its arguments and parameters, ``rows`` and ``width`` the shape
of the result, which has x's dtype. Where gradients are wanted, AOTAutograd traces two others in its
place: ``layer_forward``, which keeps autograd's record and gives a token for it (int64, on the
CPU), and ``layer_backward``, which goes back through that. A record lives as long as its token's
memory. ``layer_forward_random`` is the same of a call with random numbers, whose state a checkpoint
inside the compiled model has to repeat.

With ``backend="eager"`` nothing is traced, and autograd records the call as any other.
"""
from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.pyg.compile import standins
from gnnaccel.dispatch.run.autograd import checkpointed

_C = torch._C
_PLAIN = (Tensor, torch.nn.Parameter)
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe")
              if hasattr(torch.Tag, name))
_library = torch.library.Library("gnnaccel", "FRAGMENT")
_ops = torch.ops.gnnaccel
_numbers = itertools.count()
_records: dict[int, Recorded] = {}


class Recorded:
    """Autograd's record of a call. ``out``: its result; ``leaves``: those that gradients are wanted
    for."""

    __slots__ = ("out", "leaves")

    def __init__(self, out: Tensor, leaves: list[Tensor]) -> None:
        self.out, self.leaves = out, leaves

    def gradients(self, grad: Tensor) -> list[Tensor]:
        """Gradients, one for each leaf, in memory of its own. A leaf that comes twice has its
        gradient at its first place, and zeros at the second."""
        unique = {id(leaf): leaf for leaf in self.leaves}
        by_leaf = dict(zip(unique, torch.autograd.grad(self.out, list(unique.values()), grad,
                                                       retain_graph=True, allow_unused=True)))
        memory, result = {grad.untyped_storage().data_ptr()}, []
        for leaf in self.leaves:
            one = by_leaf.pop(id(leaf), None)
            if one is None:
                one = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
            elif one.untyped_storage().data_ptr() in memory or not one.is_contiguous():
                one = one.clone(memory_format=torch.contiguous_format)
            memory.add(one.untyped_storage().data_ptr())
            result.append(one)
        return result


# --- on real tensors ------------------------------------------------------------------------------

@torch._disable_dynamo
def _layer(call: str, x: Tensor, more: list[Tensor], rows: int, width: int) -> Tensor:
    tensors = [x, *more]
    with torch.no_grad():
        arguments = standins.without_gradients(call, tensors)
        return _owned(standins.run(call, arguments, tensors), tensors)


@torch._disable_dynamo
def _layer_forward(call: str, x: Tensor, more: list[Tensor], rows: int, width: int,
                   needed: list[bool]) -> tuple[Tensor, Tensor]:
    tensors = [x, *more]
    with _differentiating():
        leaves = standins.leaves(call, tensors, needed)
        out = standins.run(call, leaves, tensors)
    number = next(_numbers)
    token = torch.tensor(number, device="cpu")
    _records[number] = Recorded(out, [leaf for leaf, wanted in zip(leaves, needed) if wanted])
    weakref.finalize(token.untyped_storage(), _records.pop, number, None).atexit = False
    # the compiler may write into the result, and autograd may have kept it
    return out.detach().clone(memory_format=torch.contiguous_format), token


@torch._disable_dynamo
def _layer_backward(token: Tensor, grad: Tensor, sizes: list[int], dims: list[int]) -> list[Tensor]:
    recorded = _records.get(int(token))
    if recorded is None:
        raise RuntimeError(
            "what a layer kept for its backward is gone: hooks of saved tensors put something else "
            "in the place of its token. Leave these hooks out around the compiled model, or the "
            "operators with gnnaccel.enable(compile=False)")
    return recorded.gradients(grad)


def _owned(out: Tensor, tensors: list[Tensor]) -> Tensor:
    """``out``, dense and in memory that none of the tensors uses."""
    memory = out.untyped_storage().data_ptr()
    if not out.is_contiguous() or any(t.untyped_storage().data_ptr() == memory for t in tensors):
        return out.clone(memory_format=torch.contiguous_format)
    return out


def _below() -> Any:
    """The dispatch keys that a block below autograd excludes."""
    before = _C._dispatch_tls_local_exclude_set()
    with _C._AutoDispatchBelowAutograd():
        return _C._dispatch_tls_local_exclude_set() - before


_BELOW = _below()


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    """A block in which autograd records, though an operator below autograd is running. Hooks of
    saved tensors, a checkpoint's say, are for the token that the compiled model saves."""
    excluded = _C._dispatch_tls_local_exclude_set() - _BELOW
    hooks = (torch.autograd.graph.saved_tensors_hooks(_same, _same) if checkpointed()
             else contextlib.nullcontext())
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        with torch.enable_grad(), hooks:
            yield


def _same(saved: Tensor) -> Tensor:
    return saved


# --- traced ---------------------------------------------------------------------------------------

def _fake_layer(call: str, x: Tensor, more: list[Tensor], rows: Any, width: Any) -> Tensor:
    return x.new_empty((rows, width))


def _fake_forward(call: str, x: Tensor, more: list[Tensor], rows: Any, width: Any,
                  needed: list[bool]) -> tuple[Tensor, Tensor]:
    return x.new_empty((rows, width)), torch.empty((), dtype=torch.int64, device="cpu")


def _fake_backward(token: Tensor, grad: Tensor, sizes: Any, dims: list[int]) -> list[Tensor]:
    remaining = iter(sizes)
    return [grad.new_empty([next(remaining) for _ in range(dim)]) for dim in dims]


class _Traced(torch.autograd.Function):
    """``layer`` as AOTAutograd traces it where gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, call: str, rows: Any, width: Any, needed: list[bool],
                *tensors: Tensor) -> Any:
        record = (_ops.layer_forward_random if standins.call_of(call).random
                  else _ops.layer_forward).default
        with _C._AutoDispatchBelowAutograd():
            out, token = record(call, tensors[0], list(tensors[1:]), rows, width, needed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.mark_non_differentiable(token)
        ctx.shapes, ctx.needed = [t.shape for t, w in zip(tensors, needed) if w], needed
        return out, token

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:  # the result was not used
            return None, None, None, None, *(None for _ in ctx.needed)
        gradients = iter(_ops.layer_backward.default(
            *ctx.saved_tensors, grads[0], [size for shape in ctx.shapes for size in shape],
            [len(shape) for shape in ctx.shapes]))
        return (None, None, None, None,
                *(next(gradients) if wanted else None for wanted in ctx.needed))


def _autograd(call: str, x: Tensor, more: list[Tensor], rows: Any, width: Any) -> Tensor:
    tensors = [x, *more]
    needed = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    if any(needed):
        if not _C._len_torch_dispatch_stack() and all(type(t) in _PLAIN for t in tensors):
            return standins.run(call, tensors)
        return _Traced.apply(call, rows, width, needed, *tensors)[0]
    with _C._AutoDispatchBelowAutograd():
        return layer(call, x, more, rows, width)


def _define(name: str, arguments: str, results: str, real: Any, fake: Any, *tags: Any) -> None:
    _library.define(f"{name}({arguments}) -> {results}", tags=(*_TAGS, *tags))
    _library.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnnaccel::{name}", fake, lib=_library)


_CALL = "str call, Tensor x, Tensor[] more, SymInt rows, SymInt width"
_define("layer", _CALL, "Tensor", _layer, _fake_layer)
for _name, _tags in (("layer_forward", ()),
                     ("layer_forward_random", (torch.Tag.nondeterministic_seeded,))):
    _define(_name, f"{_CALL}, bool[] needed", "(Tensor, Tensor)", _layer_forward, _fake_forward,
            *_tags)
_define("layer_backward", "Tensor token, Tensor grad, SymInt[] sizes, int[] dims", "Tensor[]",
        _layer_backward, _fake_backward)
_library.impl("layer", _autograd, "Autograd")
layer: Any = _ops.layer.default
