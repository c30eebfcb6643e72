"""Linear maps of many rows, such as those of all nodes or edges of a large graph, as kernels.

torch's products are made for large matrices. Of two hundred thousand rows of 64 numbers they reach
a third of what memory allows, and the gradient of a bias reads all rows once more. The kernels are
those of the layers' own maps (`skinny_matmul`), in fp32, or in TF32 where torch's settings say so.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, compiler, nn
from torch.compiler import is_dynamo_compiling

from gnnaccel import adapters
from gnnaccel.adapters.guards import DICTS, ORDINARY, context_reason
from gnnaccel.adapters.own import home
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.ops.call import Kernel, OpCall
from gnnaccel.dispatch.plan.compiling import device_reason
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.config import current
from gnnaccel.dispatch.run import skinny_matmul
from gnnaccel.dispatch.run.autograd import checkpointed, wants_grad
from gnnaccel.dispatch.uncompiled import uncompiled

NAME = "torch.linear"
#: numbers of the rows and of the result from which the kernels gain more on an H200 than they cost
#: its host: about 170,000 rows from 64 columns to 64; and where torch makes the weight's gradient
#: alone, of which the kernels save little
MANY = 20_000_000
_MANY_OF_WEIGHT = 64_000_000
_COLUMNS = 16, 128  # of rows; of the result
#: numbers of rows below which a call is not looked at
LEAST = MANY * _COLUMNS[0] // sum(_COLUMNS)
tracing, _wrapped = torch._C._get_tracing_state, torch._C._functorch.is_functorch_wrapped_tensor
_linear, _getattr = torch._C._nn.linear, nn.Module.__getattr__

wanted = False  #: whether a large graph came since gnnaccel was enabled, or is there from before


def watch() -> None:
    """Wait for a large graph. Until then the classes are as they were."""
    global wanted
    wanted = cache.has_large()
    cache.when_large = None if wanted else _large_graph


def _large_graph() -> bool:
    global wanted
    wanted = True
    return adapters.update_on_demand_unless_busy()


def update_on_demand(patches: PatchSet) -> None:
    """`gnnaccel.adapters.update_on_demand` for torch's class."""
    if may_replace(patches, nn.Linear):
        install(patches)


def may_replace(patches: PatchSet, cls: type[nn.Module]) -> bool:
    """Whether it is time to wrap the ``forward`` of torch's class, which is still torch's."""
    return wanted and not patches.holds(cls, "forward") and home(cls.forward) == "torch"


def install(patches: PatchSet) -> None:
    """Wrap the ``forward`` of torch's class."""
    patches.set(
        nn.Linear, "forward", routed(nn.Linear.forward, of_many),
        "Maps many rows, such as those of all nodes or edges of a large graph, by a kernel, and "
        "makes the three gradients by another one, as gnnaccel's layers do in their own maps. "
        "Replaced only once a graph with at least 131,072 edges came.",
        active="While gnnaccel is enabled, for rows in float32 on a GPU, from 16 to 128 columns, "
               "with rows and results of at least 20 million numbers in all, if as many rows came "
               "before. Not for gradients within a checkpoint. `gnnaccel.exclude` of "
               "`torch.nn.Linear` or of a module opts out.",
        cost="Some 0.3 microseconds for each call, some 10 for one of so many rows.")


def routed(native: Callable, of_many: Callable[..., Any]) -> Callable:
    """The ``forward`` around ``native``, which leaves inputs of many numbers to ``of_many``: a
    function of ``native``, the module and its input."""

    @functools.wraps(native)
    def forward(self: Any, input: Any) -> Any:
        # while torch traces, sizes are tensors
        if (is_dynamo_compiling() or compiler._is_compiling_flag  # as `is_compiling` says
            or type(input) is not Tensor or tracing() is not None or input.numel() < LEAST):
            return native(self, input)
        return of_many(native, self, input)

    return forward


@uncompiled
def of_many(native: Callable, module: Any, x: Tensor) -> Tensor:
    """``module`` of many numbers."""
    config = current()
    found = weights_of(module) if config is not None and (x.is_cuda or driver.in_place) else None
    if found is None or not (fits(x, *found) and may_run(config, x, module)):
        return native(module, x)
    weight, bias = found
    operation = skinny_matmul.operation_of(x, weight, bias, again=True)
    if operation is None:
        return native(module, x)
    call = OpCall(x.device, x.dtype, plain=lambda: native(module, x),
                  kernel=Kernel("a linear map of many rows", operation.key, operation.compile,
                                lambda: operation.mapped(x, weight, bias)))
    return route.run(NAME, call, call.plain, config)


def may_run(config: Any, x: Tensor, *modules: Any) -> bool:
    """Whether kernels may do the work of these modules, here and by what the user has said."""
    if context_reason() is not None or device_reason(x.device.type, config) is not None:
        return False
    for module in modules:
        if not rules.verdict(module, config).inside:
            return False
    return True


def weights_of(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """The weight and the bias that the module's ``forward`` reads, if it is torch's map by these:
    parameters, and no attributes, properties or functions in their place."""
    cls = type(module)
    if cls is not nn.Linear and (
            not isinstance(module, nn.Module) or cls.__getattr__ is not _getattr
            or cls.__getattribute__ is not object.__getattribute__
            or hasattr(cls, "weight") or hasattr(cls, "bias")):
        return None
    own = module.__dict__
    parameters = own["_parameters"]
    if (type(parameters) not in DICTS or "weight" in own or "bias" in own
        or "bias" not in parameters or F.linear is not _linear
        # a hook of the older kind gets the gradients of torch's own node, in its order
        or own["_backward_hooks"] and not own["_is_full_backward_hook"]):
        return None
    weight = parameters.get("weight")
    return None if weight is None else (weight, parameters["bias"])


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels gain more than they cost, by size, and may have these tensors."""
    return (_pays(x, weight, bias) and are_ordinary(x, weight, bias)
            and not _kept(x, weight, bias))


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether torch's functions do what they say on these tensors, and memory holds their numbers.
    """
    for t in tensors:
        if t is not None and (type(t) not in ORDINARY or t.layout is not torch.strided
                              or t.is_neg() or _wrapped(t)):
            return False
    return True


def _kept(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's map is to keep these for its gradients in a way that kernels do not. What
    repeats a map in a checkpoint has to keep the same as the map did, which may have been torch's:
    rows did not come before, or the class was not replaced. Of inference tensors nothing is kept.
    """
    return wants_grad(x, weight, bias) and (
        checkpointed() or x.is_inference() or weight.is_inference())


def _pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether kernels gain more than they cost, by size."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] < _COLUMNS[0]:
        return False
    numbers = x.shape[0] * (x.shape[1] + weight.shape[0])
    alone = bias is None and not x.requires_grad and wants_grad(weight)
    return numbers >= (_MANY_OF_WEIGHT if alone else MANY)
