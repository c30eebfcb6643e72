"""Steps of Adam and AdamW in one kernel.

torch's own way, ``foreach``, launches a dozen kernels and takes the host 0.4 ms and more, as much
as a small model. The kernel rounds where torch's do. The optimizer keeps its options and its state,
the counts of steps on the host among it.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gnnaccel.adapters.guards import context_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda import adam as kernel
from gnnaccel.cuda import capture, driver
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.policy.config import current

_NAME = "torch.adam"
_LISTS = 6  # parameters, gradients, and the optimizer's state of each
_TENSORS = (Tensor, nn.Parameter)
_place = Tensor.data_ptr
#: options of `torch.optim.adam.adam`, and the value of each that allows the kernel
_OPEN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False,
         "grad_scale": None, "found_inf": None, "has_complex": False}
_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")

Lists = tuple[list[Tensor], ...]


def install(patches: PatchSet) -> None:
    """Wrap Adam's arithmetic. Does nothing where this torch has none by that name."""
    from torch.optim import adam

    native = vars(adam).get("adam")
    if native is not None:
        patches.set(
            adam, "adam", _wrapped(native),
            "Updates all parameters of an `Adam`, or `AdamW` where torch computes it by the same "
            "function, in one kernel, which rounds as torch's own. What the optimizer keeps, and "
            "its `state_dict`, stay as they are.",
            active="While gnnaccel is enabled, for parameters in float32 on a GPU with as many "
                   "steps behind them, of an optimizer that was made without `foreach`, `fused`, "
                   "`capturable` and `differentiable`; `foreach=True` keeps torch's way.",
            cost="Some 2 microseconds for each parameter on a GPU, one on a CPU in all.")


def _wrapped(native: Callable[..., None]) -> Callable[..., None]:
    from torch.compiler import is_compiling

    @functools.wraps(native)
    def adam(*lists: Any, **options: Any) -> None:
        if is_compiling() or not _may(lists) or not _fit(lists, options):
            return native(*lists, **options)
        config = current()
        parameters, *_, steps = lists
        call = OpCall(parameters[0].device, torch.float32,
                      plain=lambda: native(*lists, **options),
                      kernel=Kernel("Adam in one kernel", (_NAME,), kernel.prepare,
                                    lambda: _step(lists, options)))
        route.run(_NAME, call, call.plain, config)

    return adam


def _may(lists: tuple) -> bool:
    if len(lists) != _LISTS or not lists[0] or current() is None:
        return False
    return ((lists[0][0].is_cuda or driver.placed()) and not capture.capturing()
            and context_reason() is None)


def _fit(lists: Lists, options: dict[str, Any]) -> bool:
    """Whether the kernel computes what torch's own way does."""
    parameters, gradients, means, squares, largest, steps = lists
    if not all(options.get(name) is value for name, value in _OPEN.items() if name in options):
        return False
    if any(type(options[name]) not in (float, int) for name in _NUMBERS):
        return False
    count = len(parameters)
    if len(set(map(id, parameters))) != count:  # torch's kernels write to one twice
        return False
    if options["amsgrad"] and not (len(largest) == count
                                   and _alike(parameters, gradients, largest)):
        return False
    return (len(gradients) == len(means) == len(squares) == len(steps) == count
            and _alike(parameters, gradients, means, squares) and _in_step(steps)
            and _apart(gradients, parameters, means, squares, largest))


def _alike(parameters: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether all are plain tensors of fp32, contiguous, on one device, that hold their numbers as
    they are (no views that negate), the others of their parameters' shapes, and no parameter made
    in inference mode, outside of which nobody may write to it. A step asks this of each: no Python
    functions are called for them."""
    device, fp32, strided = parameters[0].get_device(), torch.float32, torch.strided
    for parameter, *beside in zip(parameters, *others):
        if parameter.is_inference():
            return False
        shape = parameter.shape
        for t in (parameter, *beside):
            if (type(t) not in _TENSORS or t.dtype is not fp32 or t.layout is not strided
                or t.get_device() != device or not t.is_contiguous() or t.is_neg()
                or t.shape != shape):
                return False
    return True


def _apart(gradients: list[Tensor], *written: list[Tensor]) -> bool:
    """Whether no ``written`` tensor begins where another one or a gradient does: torch writes list
    after list, and reads the gradients in between. Empty tensors begin nowhere."""
    places = list(map(_place, chain(*written)))
    distinct = set(places)
    distinct.discard(0)
    return (len(distinct) == len(places) - places.count(0)
            and distinct.isdisjoint(map(_place, gradients)))


def _in_step(steps: list[Tensor]) -> bool:
    """Whether ``steps`` are counts on the host, and equal."""
    first = None
    for step in steps:
        if type(step) is not Tensor or not step.is_cpu or step.dim():
            return False
        count = step.item()
        if first is None:
            first = count
        elif count != first:
            return False
    return True


def _step(lists: Lists, options: dict[str, Any]) -> None:
    parameters, gradients, means, squares, largest, steps = lists
    torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    count, (lr, beta1, beta2, decay, eps) = steps[0].item(), (options[name] for name in _NUMBERS)
    apart = options.get("decoupled_weight_decay", False)
    numbers = kernel.Numbers(
        lr / (1 - beta1 ** count) * -1, (1 - beta2 ** count) ** 0.5, 1 - beta1, beta2, 1 - beta2,
        eps, 0.0 if apart else decay, 1 - lr * decay if apart else 1.0, options["maximize"])
    most: list[Any] = largest if options["amsgrad"] else [None] * len(parameters)
    kernel.step(list(zip(parameters, gradients, means, squares, most)), numbers)
    torch.autograd.graph.increment_version([*parameters, *means, *squares, *largest])
