"""Kernels as nodes of autograd's graph. Backward runs by kernels too, and by plain torch operations
where it is itself recorded.

An `Operation` says how one computation runs in each of these ways. The rules of every node are
written once, here: which tensors are saved, that they are read a single time, the results where no
gradient arrives, and how second derivatives are made.
"""
from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import unwrap_if_dead

from gnnaccel.dispatch.run import written
from gnnaccel.dispatch.uncompiled import untraced

#: gradients, or saved inputs: None where there is none
Tensors = Sequence[Tensor | None]

_is_vmapped, _is_of_batch = _functorch.is_batchedtensor, _functorch.is_legacy_batchedtensor
_transforms_active = torch._C._are_functorch_transforms_active
_autograd = torch._C._autograd
_getframe, _is_users, _grad = sys._getframe, written.is_users.get, torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled


class Operation:
    """One call of a computation. Its tensors are the arguments of `apply`, all else are its fields.

    Subclasses define `forward`, `backward` and `reference`. Where the gradients that can be
    differentiated again are had in another way, they define `recorded` in the place of the last.
    """

    __slots__ = ()
    _node: ClassVar[Any]  # a class of torch.autograd.Function
    _apply: ClassVar[Callable[..., Any]]
    #: method (self, needs, results) -> the results without gradient, where there may be such
    without_grad: ClassVar[Callable[..., Tensors] | None] = None
    #: whether backward reads inputs that the host's code does not keep, so that callers may write
    #: to them before
    keeps_inputs: ClassVar[bool] = False
    apart: int = 0  # tells apart what `written` is to find out about apart, such as messages
    _places: ClassVar[dict[int, written.Place]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Each operation has a class of nodes: profilers tell nodes apart by their class's name.
        cls._node = type(cls.__name__.strip("_"), (_Node,), {})
        # torch's types do not show what the class is based on, which is written in C
        cls._apply = super(torch.autograd.Function, cls._node).apply  # type: ignore[misc]
        cls._places = {}
        written.of_operations.append(cls._places)

    def apply(self, *inputs: Tensor | None) -> Any:
        """The result or results on ``inputs``, as a node of autograd's graph.

        Does what `torch.autograd.Function.apply` does, in fewer steps of the interpreter.
        """
        if _transforms_active():
            return self._node.apply(self, *inputs)  # says that this cannot be
        if _inference() and _grad():  # where torch records nothing of its own
            with torch.no_grad():
                return self._apply(self, *inputs)
        if self.keeps_inputs and _grad():
            frame: Any = _getframe(1)
            while frame is not None:  # up to the innermost code of the user's
                users = _is_users(id(frame.f_code))
                if users or users is None and written.learned(frame):
                    place = self._places.get(id(frame.f_code) + self.apart)
                    if place is not None and not place.left and not place.written:
                        break
                    given, watched = written.copies(self._places, frame.f_code, inputs, self.apart)
                    out = self._apply(self, *[t if t is None else unwrap_if_dead(t) for t in given])
                    written.watch(watched, out)
                    return out
                frame = frame.f_back
        return self._apply(self, *[t if t is None else unwrap_if_dead(t) for t in inputs])

    def forward(self, needs: tuple[bool, ...], *inputs: Tensor | None) -> tuple[Any, Tensors]:
        """The result or results by kernels, and the tensors to save for backward, the inputs first.

        needs: which of the inputs want a gradient. Those that no `backward` reads may be None among
        the saved.
        """
        raise NotImplementedError

    def backward(self, needs: tuple[bool, ...], saved: list, *grads: Tensor | None) -> Tensors:
        """The gradient of each input by kernels, None where there is none.

        grads: of the results; at least one is there. saved: the tensors that `forward` saved. Those
        taken out of this list may be freed within backward.
        """
        raise NotImplementedError

    def reference(self, *inputs: Tensor | None) -> Any:
        """The results on plain torch operations, differentiable any number of times."""
        raise NotImplementedError

    def recorded(self, needs: tuple[bool, ...], saved: Tensors, *grads: Tensor | None) -> Tensors:
        """`backward` where it is itself recorded (``create_graph=True``), by `reference`."""
        return gradients(self.reference, saved[:len(needs)], needs, grads)


class Keeping(functools.partial):
    """``function(rows, *others)`` of torch, whose backward reads the rows: with gradients on it is
    called as an `Operation` is applied, and gets copies as one that keeps its inputs."""

    keeps_inputs, _places = True, dict[int, written.Place]()
    written.of_operations.append(_places)
    _numbers = itertools.count(1)
    _apply = staticmethod(functools.partial.__call__)
    _node = types.SimpleNamespace(apply=functools.partial.__call__)
    __call__: Any = Operation.apply

    def __init__(self, function: Callable[..., Tensor]):
        self.apart = self.place()

    @classmethod
    def place(cls) -> int:
        """A number for `apart`, which no other function has."""
        return next(cls._numbers) << 64  # above every id


class _Node(torch.autograd.Function):
    """The node of every `Operation`."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *inputs: Tensor | None) -> Any:
        ctx.operation, ctx.materialize_grads, needs = operation, False, ctx.needs_input_grad[1:]
        results, saved = operation.forward(needs, *inputs)
        ctx.save_for_backward(*saved)
        if operation.without_grad is not None:
            ctx.mark_non_differentiable(*operation.without_grad(needs, results))
        return results

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        operation, needs = ctx.operation, ctx.needs_input_grad[1:]
        used = batched = negated = False
        for grad in grads:
            if grad is not None:
                used = True
                # `_is_batched`, without its call
                batched = batched or _is_of_batch(grad) or _is_vmapped(grad)
                negated = negated or grad.is_neg()
        if not used:  # no result was used: nor has any input a gradient
            return (None,) * (1 + len(needs))
        saved = list(ctx.saved_tensors)  # once: a checkpoint hands out no tensor twice
        if batched:
            run = operation.recorded if torch.is_grad_enabled() else operation.backward
            return None, *_one_by_one(lambda *each: run(needs, list(saved), *each), grads)
        if negated:
            grads = _resolved(grads)
        if torch.is_grad_enabled():
            return None, *operation.recorded(needs, saved, *grads)
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: the list alone holds them now
        input_grads = operation.backward(needs, saved, *grads)
        if ctx.__class__ is not operation._node._backward_cls:
            input_grads = _for_compiler(ctx, needs, input_grads)
        return None, *input_grads


def _for_compiler(ctx: Any, needs: Sequence[bool], found: Tensors) -> list[Tensor | None]:
    """The gradients as compiled autograd needs them: one for each input that wants one, zeros where
    nothing reaches it, and no views, whose bases it compares by dimensions that they may not
    have."""
    result: list[Tensor | None] = []
    wanting = iter([edge for edge in ctx.next_functions if edge[0] is not None])
    for grad, needed in zip(found, needs):
        node, at = next(wanting) if needed else (None, 0)
        if grad is None and node is not None:
            like = node._input_metadata[at]
            grad = torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
        result.append(grad.clone() if grad is not None and grad._is_view() else grad)
    return result


class Closed(Operation):
    """An operation whose `backward` is made of operations that can be differentiated themselves."""

    __slots__ = ()

    def recorded(self, needs: tuple[bool, ...], saved: Tensors, *grads: Tensor | None) -> Tensors:
        return self.backward(needs, list(saved), *grads)


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (_is_vmapped(grad) or _is_of_batch(grad))


def _resolved(grads: Tensors) -> tuple[Tensor | None, ...]:
    """The gradients as kernels read them: memory holds the opposites of a view that negates its
    numbers, as the gradient of a complex number's imaginary part may be."""
    return tuple([None if grad is None else grad.resolve_neg() for grad in grads])


def _one_by_one(run: Callable[..., Tensors], grads: Tensors) -> list[Tensor | None]:
    """The results of the backward ``run(*grads)`` for many gradients of the results at once, as
    ``torch.autograd.grad(..., is_grads_batched=True)`` and `torch.vmap` around it have them:
    tensors without memory of their own, with a hidden dimension."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    first: Any = next(filter(_is_batched, grads))
    of: Any = _functorch
    if _is_vmapped(first):
        level = _functorch.maybe_get_level(first)
    else:
        of, level = torch, max(1, torch._C._vmapmode_increment_nesting() - 1)
        torch._C._vmapmode_decrement_nesting()
    count = of._remove_batch_dim(first, level, 1, 0).shape[0]
    apart = [None if grad is None else of._remove_batch_dim(grad, level, count, 0)
             for grad in grads]
    each = [[None if grad is None else grad[at] for grad in apart] for at in range(count)]
    if any(map(_is_batched, apart)):  # several such dimensions
        results = [_one_by_one(run, one) for one in each]
    else:
        with temporarily_clear_interpreter_stack():
            results = [list(run(*_resolved(one))) for one in each]
    return [None if one[0] is None else of._add_batch_dim(torch.stack(one), 0, level)
            for one in map(list, zip(*results))]


def one_by_one(backward: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """The ``backward`` of a `torch.autograd.Function`, of which many gradients may be asked for at
    once, and which reads their memory."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Tensors:
        if not any(map(_is_batched, grads)):
            return backward(ctx, *_resolved(grads))
        return tuple(_one_by_one(functools.partial(backward, _Read(ctx)), grads))

    return run


class _Read:
    """A node's ``ctx`` for several backwards: a checkpoint hands out no saved tensor twice."""

    def __init__(self, ctx: Any):
        self.__dict__["_ctx"] = ctx

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name == "saved_tensors":
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def gradients(function: Callable[..., Any], inputs: Tensors, needs: Sequence[bool], grads: Tensors,
              create_graph: bool = True) -> tuple:
    """The gradients of the inputs of ``function``, whose result or results have ``grads``.

    They can be differentiated again with ``create_graph``.
    """
    with torch.enable_grad():
        # Aliases, since one input may be another one, or made from it: each has its own gradient.
        inputs = tuple([None if t is None else t.view_as(t) for t in inputs])
        results = function(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    # without results that have no gradient, and those that are made of frozen inputs alone
    pairs = [(t, grad) for t, grad in zip(results, grads) if grad is not None and t.requires_grad]
    wanted = [t for t, need in zip(inputs, needs) if need and t is not None]
    if not pairs or not wanted:
        return (None,) * len(inputs)
    in_order = iter(torch.autograd.grad([t for t, _ in pairs], wanted, [grad for _, grad in pairs],
                                        create_graph=create_graph, allow_unused=True))
    return tuple([next(in_order) if need and t is not None else None
                  for t, need in zip(inputs, needs)])


def stand_in(grad: Tensor, rows: int) -> Tensor:
    """Zeros for an input of so many rows that was not saved: where the result is linear in it, the
    gradients do not depend on its value. ``grad``: that of the result."""
    return grad.new_zeros(rows, *grad.shape[1:]).requires_grad_()


def turned(matrices: Tensor) -> Tensor:
    """The matrices transposed. Their own gradient lies in memory as they do, as that of a linear
    map's weight does: users take ``grad.view(-1)``."""
    found = matrices.mT
    if found.requires_grad:
        found.register_hook(_as_turned)
    return found


def _as_turned(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.mT.contiguous().mT


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether results made of these tensors are to be nodes of autograd's graph."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


# --- checkpoints ----------------------------------------------------------------------------------
#
# A checkpoint repeats the calls in it in backward, and both have to save the same tensors.

def by_disabling(ignore_is_tracing: bool) -> bool | None:
    """`saved_tensor_hooks` for versions of torch without a function for it: torch refuses to
    disable hooks while there are any. True, or None where there are none."""
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return None  # they are disabled already, as in a function transform
    try:
        _autograd._saved_tensors_hooks_disable("gnnaccel asks whether there are hooks")
    except RuntimeError:
        return True
    finally:
        _autograd._saved_tensors_hooks_enable()
    return None


#: Private to torch; 2.4 to 2.7 lack it. `checkpointed`, for code that cannot afford a call,
#: is ``saved_tensor_hooks(True) is not None``.
saved_tensor_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", by_disabling)


def checkpointed() -> bool:
    """Whether saved tensors go through hooks here, as those of a checkpoint do; a script's own
    hooks look the same."""
    return saved_tensor_hooks(True) is not None
