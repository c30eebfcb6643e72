"""Reasons why a layer of any host stays native whatever its kernels could do: where the call
happens, its arguments, and modules that do more than their class says."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as _modules
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils._device import DeviceContext

from gnnaccel.adapters.calls import bind
from gnnaccel.adapters.contract import Contract
from gnnaccel.adapters.own import Path, forward_is_own, is_method
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.dispatch.uncompiled import uncompiled

_tracing, _transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_grad = torch.is_grad_enabled
made: IdentityMap[bool] = IdentityMap()  # layers (`note_made`)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
#: function modes that leave the results of layers as they are: a default device's, and gnnaccel's
PASSIVE_MODES: set[type] = {DeviceContext}
#: types of a module's parameters on which torch's functions do what they say; others, such as
#: quantized weights, may have functions of their own
ORDINARY = frozenset((Parameter, UninitializedParameter, Tensor, type(None)))
TENSORS = (Tensor, Parameter)  #: types of arguments that kernels read
WEIGHTS = ("weight", "bias")
DICTS = (dict, OrderedDict)  #: types of a module's parameters, by torch's version
#: names of the hooks of a module, and what gives them of its attributes
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                    "_backward_pre_hooks")
MODULE_HOOKS = itemgetter(*HOOKS_OF_MODULES)


def _any_global_hook() -> bool:
    return bool(_modules._global_forward_hooks or _modules._global_forward_pre_hooks
                or _modules._global_backward_hooks
                or _modules._global_backward_pre_hooks)


# torch has it by that name from 2.5 or 2.6 on
any_global_hook = getattr(_modules, "_has_any_global_hook", _any_global_hook)


@uncompiled
def context_reason() -> Reason | None:
    """Why nothing can be taken over here: tracing, a transform or a mode that must see every
    operation, or hooks that must see every module."""
    if _tracing() is not None:
        return reason("GA404", "torch.jit is tracing")
    if _transform() is not None:
        return reason("GA405")
    if _dispatch_modes():
        return reason("GA405", "a torch dispatch mode is active")
    if (modes := _function_modes()) and sees_functions(modes):
        return reason("GA405", "a torch function mode is active",
                      "call the layer outside of the mode")
    if forward_ad._current_level >= 0:
        return reason("GA405", "forward-mode differentiation is going on")
    if any_global_hook():
        return reason("GA501", "hooks on all modules are registered")
    return None


def sees_functions(modes: int) -> bool:
    """Whether one of so many active function modes may change the results of torch's functions."""
    return any(type(_mode_at(i)) not in PASSIVE_MODES for i in range(modes))


def module_reason(layer: Any, path: Path) -> Reason | None:
    """Why this layer object must run the host's own code: something on its ``path``, or a method on
    the object itself, is not the host's, or a parameter of its own, or a tensor in its place, has
    other functions than torch's."""
    own = layer.__dict__
    keys = own.keys()
    if not keys.isdisjoint(path.names):
        for name in path.names.intersection(own):
            # PyG's own setters bind the class's functions to the object
            if not is_method(own[name], type(layer), name, path.host):
                return reason("GA205", f"{name} is replaced on the layer object")
    found = extraordinary(own)
    if found is not None:
        return reason("GA208", f"{found} is a {type(getattr(layer, found)).__name__}")
    for name in keys & path.parts:
        if callable(own[name]):
            return reason("GA205", f"{name} is a {type(own[name]).__name__} and no module")
    for name in keys & path.parameters:
        if own[name] is not None and not isinstance(own[name], Tensor):
            return reason("GA208", f"{name} is a {type(own[name]).__name__} and no parameter")
    return path.why


def parametrized_reason(layer: Any) -> Reason | None:
    """Why a layer runs the host's own code that computes weights another number of times than
    kernels do: a parametrization of its own or of a module in it may give other numbers each time,
    or leave something else behind, as spectral_norm does in training."""
    todo = [layer]
    for module in todo:  # which grows
        inside = module._modules
        if "parametrizations" in inside:
            parametrizations = inside["parametrizations"]._modules
            for name in parametrizations:
                if not all(map(_repeatable, parametrizations[name]._modules.values())):
                    return reason("GA208", f"{name} is parametrized",
                                  "torch's weight_norm, orthogonal and activations run by kernels")
        todo += [one for name, one in inside.items()
                 if one is not None and name != "parametrizations"]
    return None


def _repeatable(made: Any) -> bool:
    """Whether a parametrization gives the same each time, and has no other effect."""
    kinds, cls = torch.nn.utils.parametrizations, type(made)
    return (cls in (kinds._WeightNorm, kinds._Orthogonal)
            or (cls.__module__ == "torch.nn.modules.activation" and cls is not torch.nn.RReLU)
            or (type(made) is kinds._SpectralNorm and not made.training))


def features_reason(x: Any, name: str = "x") -> Reason | None:
    """Why this feature tensor cannot be taken: not a plain dense [N, F] floating tensor with
    channels."""
    if type(x) is not Tensor and type(x) is not Parameter:
        return reason("GA206", f"{name} is a {type(x).__name__}")
    if x.dim() != 2:
        return reason("GA206", f"{name} has {x.dim()} dimensions")
    if not x.shape[1]:
        return reason("GA206", f"{name} has no channels")
    if x.layout != torch.strided or not x.is_floating_point() or x.is_meta:
        return reason("GA206", f"{name} is {x.layout}, {x.dtype}, on the {x.device.type} device")
    return (reason("GA206", f"{name} is a view that negates its numbers", "call resolve_neg()")
            if x.is_neg() else None)


def types_reason(types: Any, x: Tensor, name: str) -> Reason | None:
    """Why ``types`` are no types of the rows ``x``."""
    if (type(types) is not Tensor or types.layout != torch.strided
        or types.dtype not in (torch.int64, torch.int32)):
        return reason("GA204", f"{name} is a {getattr(types, 'dtype', type(types).__name__)}",
                      "use int64 or int32 types")
    if types.dim() != 1 or types.shape[0] != x.shape[0] or types.device != x.device:
        return reason("GA206",
                      f"{name} is {list(types.shape)} on {types.device} for {x.shape[0]} "
                      f"rows on {x.device}")
    return None


def inference_reason(given: Iterable[Any]) -> Reason | None:
    """Why a call with these arguments runs the host's own code: features were made in inference
    mode, and gradients are on. Autograd cannot save such tensors, and kernels keep what they are
    given where the host keeps what it gathered."""
    if _grad() and any(a.is_inference() and a.is_floating_point() for a in _tensors_in(given)):
        return reason("GA212")
    return None


def subclass_reason(given: Iterable[Any]) -> Reason | None:
    """Why a call with these arguments runs the host's own code: a tensor is of a subclass, whose
    functions may be others than torch's, and of which results are."""
    for a in _tensors_in(given):
        if type(a) not in ORDINARY:
            return reason("GA206", f"an argument is a {type(a).__name__}")
    return None


def _tensors_in(given: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in pairs and dictionaries included."""
    todo = list(given)
    for a in todo:  # which grows
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            todo += a
        elif isinstance(a, dict):
            todo += a.values()


def edge_reason(edge_attr: Any, edges: int, x: Tensor) -> Reason | None:
    """Why these edge features cannot be taken: not one plain row of the features' dtype per
    edge."""
    if type(edge_attr) is not Tensor and type(edge_attr) is not Parameter:
        return reason("GA206", f"edge_attr is a {type(edge_attr).__name__}")
    if (edge_attr.layout != torch.strided or edge_attr.dim() not in (1, 2)
        or edge_attr.shape[0] != edges or edge_attr.is_neg()):
        return reason("GA206",
                      f"edge_attr is {edge_attr.layout} of shape {list(edge_attr.shape)} "
                      f"for {edges} edges")
    if edge_attr.device != x.device:
        return reason("GA206", f"edge_attr is on {edge_attr.device}, the features on {x.device}")
    if edge_attr.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return reason("GA203", f"edge_attr is {edge_attr.dtype}, x is {x.dtype}")
    return None


def lazy_reason(*modules: Any) -> Reason | None:
    """Why a layer with these maps runs the host's own code: a weight is still to be made, or was
    made in inference mode, so that autograd cannot save it, and gradients are on."""
    trained = _grad()
    for module in modules:
        if module is not None:
            # past `Module.__getattr__`: a parametrization would compute the weight once more
            own = module._parameters  # a ScriptModule's is no dictionary
            weight = own.get("weight") if type(own) in DICTS else getattr(module, "weight", None)
            if isinstance(weight, UninitializedParameter):
                return reason("GA209")
            if trained and type(weight) is Parameter and weight.is_inference():
                return reason("GA209", "a weight was made in inference mode",
                              "make the layer's weights outside of torch.inference_mode()")
    return None


def declared(module: Any, name: str = "weight") -> Any:
    """A parameter of the module, or a tensor of its dtype and shape: a parametrization is not
    computed, as it may draw numbers or change its state. None where the module has nothing by this
    name."""
    own = module._parameters
    parameter = own.get(name) if type(own) in DICTS else None
    if parameter is None:
        parametrization = getattr(module._modules.get("parametrizations"), name, None)
        if parametrization is None or parametrization.unsafe or not parametrization.is_tensor:
            # the original may be of another dtype and shape
            return getattr(module, name, None)
        parameter = parametrization.original
    return parameter


def note_made(layer: Any, native: bool) -> None:
    """Note of a call, which goes ``native`` or not, whether it makes the layer's weights within a
    checkpoint. It is repeated in backward, when they are there, and must go natively there, too:
    both calls have to save the same tensors."""
    if (native and checkpointed()
        and any(isinstance(p, UninitializedParameter) for p in layer.parameters())):
        made.set(layer, True)
    elif made_here(layer) and torch._C._current_graph_task_id() == -1:
        made.set(layer, False)  # the next forward call: as ever


def made_here(layer: Any) -> bool:
    """Whether a call that is under way makes the layer's weights within a checkpoint, or repeats
    the call that did."""
    return bool(made.entries) and bool(made.get(layer))


def repeated_reason(layer: Any) -> Reason | None:
    """Why a call that may repeat the one that made the weights (`note_made`) goes native."""
    if not made_here(layer) or torch._C._current_graph_task_id() == -1:
        return None
    return reason("GA209", "a checkpoint repeats the call that made the weights")


def has_hooks(module: Any) -> bool:
    """Whether calling the module does more than its ``forward``."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                or own["_backward_pre_hooks"])


def extraordinary(own: dict[str, Any]) -> str | None:
    """The name of a module's parameter, or of a tensor that it holds as a plain attribute, as after
    ``del lin.weight; lin.weight = ...``, that is no ordinary tensor; None where all are. ``own``:
    the module's attributes."""
    parameters = own["_parameters"]
    for name in parameters:
        if type(parameters[name]) not in ORDINARY:
            return name
    for name in own:
        kind = type(own[name])
        # torch's metaclass is asked first, as it costs no call for numbers, strings and the like
        if kind not in ORDINARY and type(kind) is not type and issubclass(kind, Tensor):
            return name
    return None


def replaceable(layer: Any) -> bool:
    """Whether the layer or a module in it holds a tensor as a plain attribute, as after ``del
    conv.att_src; conv.att_src = ...``, of which `signature.of_modules` does not tell when it is
    replaced by one of a subclass. Tensors that hosts cache under private names do not count."""
    todo = [layer]
    for module in todo:  # which grows
        own = module.__dict__
        for name in own:
            if (type(own[name]) is Tensor and name[0] != "_"
                and (module is layer or name not in WEIGHTS)):
                return True
        if own["_modules"]:
            todo += [one for one in own["_modules"].values() if one is not None]
    return False


def ordinary(module: Any) -> bool:
    """Whether the module's parameters are ordinary tensors, so that their numbers say all."""
    return extraordinary(module.__dict__) is None


def plain(module: Any, cls: type) -> bool:
    """Whether the module is a ``cls`` and nothing else, so that an adapter may do its work in its
    place: not a subclass (parametrizations make one), with the ``forward`` that the class was
    written with, parameters that are ordinary tensors, nobody watching."""
    if (type(module) is not cls or "forward" in (own := module.__dict__)
            or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
            or own["_backward_pre_hooks"]):  # `has_hooks`, which runs for every module
        return False
    parameters = own["_parameters"]  # `ordinary`, for the same reason
    for name in parameters:
        if type(parameters[name]) not in ORDINARY:
            return False
    if ("weight" in own and type(own["weight"]) not in ORDINARY
            or "bias" in own and type(own["bias"]) not in ORDINARY):
        return False
    return not any_global_hook() and forward_is_own(cls)


# --- shapes ---------------------------------------------------------------------------------------
#
# The shapes in which kernels read a layer's parameters follow from its sizes. Where somebody
# assigned another parameter, or another size, the host raises or broadcasts, and kernels would read
# beyond an end. A layer's module declares the shapes (`Contract.shapes`), and `checked` compares
# them in every call that is stated.

#: dotted name of a parameter -> its shape; None: any number
Shapes = dict[str, "tuple[int | None, ...]"]


def of_heads(layer: Any, heads: int, width: int, maps: Iterable[str], vectors: Iterable[str],
             plain: Callable[[Any], bool], columns: int | None = None) -> Shapes:
    """Shapes of an attention layer's ``vectors``, and of those of its modules ``maps`` that are
    linear maps, for which ``plain`` holds. Results of other modules are checked when they are
    computed."""
    shapes: Shapes = dict.fromkeys(vectors, (1, heads, width))
    for name in maps:
        module = layer.get_submodule(name) if "." in name else layer._modules.get(name)
        if module is not None and plain(module):
            for own, shape in (("weight", (heads * width, columns)), ("bias", (heads * width,))):
                if module._parameters.get(own) is not None:
                    shapes[f"{name}.{own}"] = shape
    return shapes


def stated(contract: Contract, layer: Any, args: tuple, kwargs: dict) -> Any:
    """The result of ``contract.state`` for a call, or why its arguments do not fit, or kernels
    would misread the layer's parameters."""
    if contract.ARGUMENTS is None:
        found = contract.state(layer, args, kwargs)
    else:
        bound = bind(args, kwargs, *contract.ARGUMENTS)
        if bound is None:
            return reason("GA206", f"the arguments do not fit {type(layer).__name__}.forward")
        found = contract.state(layer, *bound)
    if contract.shapes is None or type(found) is Reason:
        return found
    spec, inputs = found
    return unfit(layer, contract.shapes(layer, inputs), inputs.device,
                 spec.row if contract.ONE_DTYPE else None) or found


def unfit(layer: Any, shapes: Shapes, device: torch.device | None = None,
          dtype: torch.dtype | None = None) -> Reason | None:
    """Why the layer's parameters are not of these shapes, on this device and of this dtype, if
    these are given; autocast casts all but float64."""
    for name, shape in shapes.items():
        path, _, own = name.rpartition(".")
        t = declared(layer.get_submodule(path) if path else layer, own)
        if t is None:
            return reason("GA206", f"{name} is None")
        if t.dim() != len(shape) or [1 for size, one in zip(shape, t.shape)
                                     if size is not None and size != one]:
            expected = str(list(shape)).replace("None", "any")
            return reason("GA206", f"{name} is {list(t.shape)}, not {expected}")
        if 0 in t.shape:
            return reason("GA206", f"{name} is {list(t.shape)}: there is nothing to read")
        if device is not None and t.device != device:
            return reason("GA206", f"{name} is on {t.device}, the call on {device}")
        if dtype is not None and t.dtype is not dtype and (
                torch.float64 in (t.dtype, dtype) or not torch.is_autocast_enabled(t.device.type)):
            return reason("GA203", f"rows are {dtype}, {name} is {t.dtype}", "convert one of them")
    return None
