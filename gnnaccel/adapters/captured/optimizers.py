"""Steps of Adam and AdamW in one kernel, where ``enable(capture=True)`` asks for whole steps.

The optimizer keeps its options and its state, the counts of steps on the host among it: torch's own
fused kernel is given the count that all parameters share.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import adam as of_adam

from gnnaccel.adapters.captured import modules
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda import capture
from gnnaccel.dispatch.policy import config as configs

_LISTS = 6  # parameters, gradients, and what the optimizer keeps of each
_TENSORS = (Tensor, nn.Parameter)
#: options of `torch.optim.adam.adam` that leave the way open, and with which of their values
_OPEN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False,
         "grad_scale": None, "found_inf": None, "has_complex": False}
_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")


def asked(patches: PatchSet) -> None:
    """Put the wrapper in or out, as the configurations ask."""
    if configs.capturing and not patches.holds(of_adam, "adam"):
        replace(patches)
    elif not configs.capturing:
        patches.undo(of_adam, "adam")


def replace(patches: PatchSet) -> None:
    """Put the wrapper of Adam's arithmetic in. Nothing where this torch has no fused kernel."""
    if hasattr(torch, "_fused_adam_") and "adam" in vars(of_adam):
        patches.set(
            of_adam, "adam", _wrapped(of_adam.adam),
            "Updates all parameters of an `Adam`, or `AdamW` where torch computes it by the same "
            "function, in one kernel of torch's, `torch._fused_adam_`. What the optimizer keeps, "
            "and its `state_dict`, stay as they are.",
            active="While `enable(capture=True)` holds, for parameters in float32 on a GPU with as "
                   "many steps behind them, of an optimizer that was made without `foreach`, "
                   "`fused`, `capturable` and `differentiable`.",
            cost="Some 2 microseconds for each parameter.")


def _wrapped(native: Callable[..., None]) -> Callable[..., None]:
    from torch.compiler import is_compiling

    @functools.wraps(native)
    def adam(*lists: Any, **options: Any) -> None:
        if is_compiling() or len(lists) != _LISTS or not _asked() or not _fit(lists, options):
            return native(*lists, **options)
        _fused(lists, options)

    return adam


def _asked() -> bool:
    config = configs.current()
    return config is not None and config.capture and not capture.capturing()


def _fit(lists: tuple[list[Tensor], ...], options: dict[str, Any]) -> bool:
    """Whether torch's kernel takes the parameters, and makes of them what torch's own way makes."""
    parameters, gradients, *kept, steps = lists
    if not parameters or not all(options.get(name) is value for name, value in _OPEN.items()
                                 if name in options):
        return False
    if any(type(options[name]) not in (float, int) for name in _NUMBERS):
        return False
    device = parameters[0].device
    if device.type not in modules.DEVICES:
        return False
    of_each = [parameters, gradients, *(one for one in kept if one)]
    if any(len(one) != len(parameters) for one in (*of_each, steps)):
        return False
    for tensors in zip(*of_each):
        strides = tensors[0].stride()
        if not tensors[0].is_contiguous() or any(
            type(t) not in _TENSORS or t.dtype is not torch.float32 or t.device != device
            or t.layout is not torch.strided or t.stride() != strides for t in tensors):
            return False
    return all(type(step) is Tensor and step.is_cpu and step.dim() == 0 for step in steps) and len(
        {step.item() for step in steps}) == 1


def _fused(lists: tuple[list[Tensor], ...], options: dict[str, Any]) -> None:
    """The step of an optimizer made with ``fused=True``, its counts of steps left on the host."""
    parameters, gradients, means, squares, largest, steps = lists
    torch._foreach_add_(steps, 1)
    # one number on the device, which the kernel reads for each parameter
    step = torch.full((), steps[0].item(), dtype=torch.float32, device=parameters[0].device)
    update = torch._fused_adamw_ if options.get("decoupled_weight_decay") else torch._fused_adam_
    update(parameters, gradients, means, squares, largest, [step] * len(parameters),
           amsgrad=options["amsgrad"], maximize=options["maximize"], grad_scale=None,
           found_inf=None, **{name: options[name] for name in _NUMBERS})
