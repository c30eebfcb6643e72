"""Modules and parameters of a layer while its ``message`` is traced: as functions of stand-ins."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters import guards, own
from gnnaccel.adapters.tracing.attention.traced import Param
from gnnaccel.adapters.tracing.later import other
from gnnaccel.adapters.tracing.layer.torch_kinds import kind
from gnnaccel.adapters.tracing.rows import untold
from gnnaccel.adapters.tracing.rows.standins import Unseen


class Held:
    """Gives a parameter, ``value``, whatever the call."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __call__(self, given: Any) -> Any:
        return self.value


def parameter(value: Any) -> Param:
    make = Held(value)
    return Param(make, torch.empty_like(value, device="meta"), (make,))


#: parameters of `nn.GRUCell` and `nn.LSTMCell`
_OF_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
#: modules that are one function of their input and their options
ACTIVATIONS: dict[type, Callable[..., Any]] = {
    nn.ReLU: lambda module, x: F.relu(x),
    nn.LeakyReLU: lambda module, x: F.leaky_relu(x, module.negative_slope),
    nn.ELU: lambda module, x: F.elu(x, module.alpha),
    nn.SiLU: lambda module, x: F.silu(x),
    nn.GELU: lambda module, x: F.gelu(x, approximate=module.approximate),
    nn.Softplus: lambda module, x: F.softplus(x, module.beta, module.threshold),
    nn.Sigmoid: lambda module, x: torch.sigmoid(x),
    nn.Tanh: lambda module, x: torch.tanh(x),
    nn.PReLU: lambda module, x: F.prelu(x, parameter(module.weight)),  # type: ignore  # stand-ins
    nn.SELU: lambda module, x: F.selu(x),
    nn.CELU: lambda module, x: F.celu(x, module.alpha),
    nn.Hardtanh: lambda module, x: F.hardtanh(x, module.min_val, module.max_val),
    nn.Mish: lambda module, x: F.mish(x),
    nn.ReLU6: lambda module, x: F.hardtanh(x, module.min_val, module.max_val),
    nn.Hardsigmoid: lambda module, x: F.hardsigmoid(x),
    nn.Hardswish: lambda module, x: F.hardswish(x),
    nn.LogSigmoid: lambda module, x: F.logsigmoid(x),
    nn.Softsign: lambda module, x: F.softsign(x),
    nn.Tanhshrink: lambda module, x: F.tanhshrink(x),
    nn.Softmax: lambda module, x: F.softmax(x, dim=module.dim),
    nn.LogSoftmax: lambda module, x: F.log_softmax(x, dim=module.dim),
    nn.GLU: lambda module, x: F.glu(x, module.dim),
    nn.Dropout: lambda module, x: F.dropout(x, module.p, module.training, module.inplace),
    nn.LayerNorm: lambda module, x: F.layer_norm(
        x, module.normalized_shape, *(None if t is None else parameter(t) for t in  # type: ignore
                                      (module.weight, module.bias)), module.eps),
    nn.GroupNorm: lambda module, x: F.group_norm(
        x, module.num_groups, *_held(module, "weight", "bias"),  # type: ignore[call-arg]  # two
        module.eps),
    nn.BatchNorm1d: lambda module, x: _through(module, x),
    nn.Embedding: lambda module, x: F.embedding(
        x, parameter(module.weight), module.padding_idx,  # type: ignore[arg-type]  # stand-ins
        *_counted_rows(module)),
    nn.Hardshrink: lambda module, x: F.hardshrink(x, module.lambd),
    nn.Softshrink: lambda module, x: F.softshrink(x, module.lambd),
    nn.Threshold: lambda module, x: F.threshold(x, module.threshold, module.value, module.inplace),
    nn.Flatten: lambda module, x: x.flatten(module.start_dim, module.end_dim),
    nn.Unflatten: lambda module, x: x.unflatten(module.dim, module.unflattened_size),
    nn.Bilinear: lambda module, x, y: F.bilinear(x, y, *_held(module, "weight", "bias")),
    nn.GRUCell: lambda module, x, h: _gru_cell(x, h, *_held(module, *_OF_CELL)),
    nn.LSTMCell: lambda module, x, states: other("nodes.node_pieces").lstm_cell(
        x, states, *_held(module, *_OF_CELL)),
    nn.Conv1d: lambda module, x: _convolved(module, x),
    nn.Identity: lambda module, x: x}
if hasattr(nn, "RMSNorm"):  # in newer versions of torch
    ACTIVATIONS[nn.RMSNorm] = lambda module, x: F.rms_norm(
        x, module.normalized_shape, _held(module, "weight")[0], module.eps)
_NEWER = ("rms_norm",) if hasattr(F, "rms_norm") else ()
_CALLED = ("linear", "leaky_relu", "relu", "dropout", "elu", "silu", "gelu", "softplus",
           "layer_norm", "batch_norm", "embedding", "prelu", "selu", "celu", "hardtanh", "mish",
           "hardsigmoid", "hardswish", "logsigmoid", "softsign", "tanhshrink",
           "softmax", "log_softmax", "glu", "hardshrink", "softshrink", "threshold", "bilinear",
           "conv1d", "group_norm", *_NEWER)


def _held(module: nn.Module, *names: str) -> list[Any]:
    """The parameters of these names, None where there is none."""
    held = [module._parameters[name] for name in names]
    return [None if one is None else parameter(one) for one in held]


def _convolved(module: Any, x: Any) -> Any:
    if module.padding_mode != "zeros":
        raise Unseen
    weight, bias = _held(module, "weight", "bias")
    return F.conv1d(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)


def _gru_cell(x: Any, h: Any, of_x: Any, of_h: Any, bias_x: Any, bias_h: Any) -> Any:
    """`nn.GRUCell`, of messages gate by gate."""
    if _are_of_nodes(x, h):
        return other("nodes.node_pieces").gru_cell(x, h, of_x, of_h, bias_x, bias_h)
    from_x, from_h = F.linear(x, of_x, bias_x).chunk(3, -1), F.linear(h, of_h, bias_h).chunk(3, -1)
    reset, kept = torch.sigmoid(from_x[0] + from_h[0]), torch.sigmoid(from_x[1] + from_h[1])
    new = torch.tanh(from_x[2] + reset * from_h[2])
    return new + kept * (h - new)


def _through(module: nn.Module, x: Any) -> Any:
    """A module that looks at all rows."""
    return other("nodes.node_pieces").through(x, module) if _are_of_nodes(x) else x.through(module)


def _are_of_nodes(*values: Any) -> bool:
    of_nodes = other("nodes.node_values").NodeValue, other("rows.zero_rows").ZeroRows
    return any(isinstance(one, of_nodes) for one in values)


#: modules that hold others under names, or in their order
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: all modules of torch's that are followed by what they are
_KINDS = frozenset((nn.Linear, *_CONTAINERS, *ACTIVATIONS))


_OPTIONS = frozenset((int, float, bool, str, tuple))
_SIMPLE = (*_OPTIONS, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING = itertools.repeat(object())  # in place of what a module has no more


class Looks:
    """Properties of a module on which `module_of` depends besides `functions`: its class, its
    options, parameters and hooks, and its modules. The ``data`` of a parameter may change its shape
    and dtype.

    ``names``, ``options``: the attributes that are options, or None, which may become one;
    ``others``: attributes that torch gives no module, of no type of `_SIMPLE`, any of which may
    become one; ``inside``: modules of `_CONTAINERS`, by name.
    """

    __slots__ = ("cls", "forward", "own_forward", "hooked", "count", "names", "options", "types",
                 "others", "parameters", "inside", "called")

    def __init__(self, module: nn.Module):
        own_dict = module.__dict__
        self.cls, self.forward = type(module), type(module).forward
        self.own_forward, self.count = "forward" in own_dict, len(own_dict)
        self.hooked = any(guards.MODULE_HOOKS(own_dict))
        simple = {name: v for name, v in own_dict.items() if type(v) in _SIMPLE}
        self.names, self.options = tuple(simple), tuple(simple.values())
        self.types = [*map(type, self.options)]
        self.others = tuple([name for name in own_dict if name not in simple
                             and name not in _OF_TORCH])
        self.parameters = [_parameter_looks(t) for t in own_dict["_parameters"].values()]
        holds = kind(module, _KINDS) in _CONTAINERS
        modules = own_dict["_modules"] if holds else {}
        self.inside = [None if one is None else Looks(one) for one in modules.values()]
        self.called = [*modules] if holds else None

    def holds(self, module: nn.Module) -> bool:
        """Whether a module looks so."""
        pairs: list[tuple[Any, Any]] = [(module, self)]
        for one, looks in pairs:  # with those inside of it, which come to the end of the list
            own_dict = one.__dict__
            if (type(one) is not looks.cls or looks.cls.forward is not looks.forward
                or len(own_dict) != looks.count or ("forward" in own_dict) != looks.own_forward
                or any(guards.MODULE_HOOKS(own_dict)) != looks.hooked):
                return False
            options = tuple(map(own_dict.get, looks.names, _MISSING))
            # types first: to compare a tensor is to compute
            if [*map(type, options)] != looks.types or options != looks.options:
                return False
            for name in looks.others:
                if type(own_dict.get(name)) in _SIMPLE:
                    return False
            parameters = own_dict["_parameters"]
            if len(parameters) != len(looks.parameters):
                return False
            for t, was in zip(parameters.values(), looks.parameters):
                if (id(t) != was[0] or type(t) is not was[1]  # which `swap_tensors` changes
                    or (was[2] and (t.shape != was[2] or t.dtype is not was[3]))):
                    return False
            if looks.called is not None:
                modules = own_dict["_modules"]
                if [*modules] != looks.called:
                    return False
                for pair in zip(modules.values(), looks.inside):
                    if pair[0] is not pair[1]:
                        if pair[0] is None or pair[1] is None:
                            return False
                        pairs += [pair]  # without a call
        return True


def _parameter_looks(t: Tensor | None) -> tuple:
    """Id and type of a parameter, and if it is a plain one its shape and dtype."""
    if type(t) is nn.Parameter:
        return id(t), type(t), t.shape, t.dtype
    return id(t), type(t), None, None


def functions() -> tuple:
    """Functions that the forward functions of such modules call."""
    return (F.linear, F.leaky_relu, F.relu, F.dropout, F.elu, F.silu, F.gelu, F.softplus,
            F.layer_norm, F.batch_norm, F.embedding, F.prelu, F.selu, F.celu, F.hardtanh, F.mish,
            F.hardsigmoid, F.hardswish, F.logsigmoid, F.softsign, F.tanhshrink, F.softmax,
            F.log_softmax, F.glu, F.hardshrink, F.softshrink, F.threshold, F.bilinear,
            F.conv1d, F.group_norm, *((F.rms_norm,) if _NEWER else ()), torch.sigmoid, torch.tanh)


#: attributes of a module itself where it does not run its class's code on its parameters
_OWN = frozenset(("forward", "weight", "bias"))


def _runs_as_written(module: nn.Module) -> bool:
    """Whether nobody watches the module, and what it runs is torch's own, on its parameters: a
    weight that is a plain tensor may be another one in each call, which `Looks` do not see, and
    functions do not do what they say on one that is more than a tensor."""
    own_dict = module.__dict__
    if (any(guards.MODULE_HOOKS(own_dict)) or not guards.ordinary(module)
        or not _OWN.isdisjoint(own_dict) and not own_dict.keys() & _OWN == {"bias"}
        or type(own_dict.get("bias", True)) is not bool):  # which a cell has
        return False
    return own.home(type(module).forward) == "torch" and are_torchs(functions())


def are_torchs(found: tuple) -> bool:
    """Whether these `functions` are torch's own."""
    return all(own.is_torchs(function, name, "torch_geometric")
               for function, name in zip(found, (*_CALLED, "sigmoid", "tanh")))


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Function:
    """A ``module`` as a function, ``called``; ``entered()`` stands for it where code asks for what
    it holds, or for its methods. Its text is another than the module's."""

    def __init__(self, module: nn.Module, called: Callable, entered: Callable):
        self._traced_module, self._traced_called = module, called
        self._traced_entered = entered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced_called(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _STATISTICS:  # which a call of the module changes, before or after
            raise Unseen
        return getattr(self._traced_entered(), name)

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __str__ = __repr__ = __format__ = _refuses

    def __bool__(self) -> bool:
        """A sequence of no modules is false, and a user's own may say so."""
        module = self._traced_module
        if kind(module, _KINDS) is nn.Sequential:
            return bool(module._modules)
        return not any(hasattr(module, name) for name in ("__bool__", "__len__")
                       ) or self._refuses()

    def __iter__(self) -> Any:
        return iter(self._traced_parts())

    def __len__(self) -> int:
        return len(self._traced_parts())

    def __getitem__(self, place: Any) -> Any:
        return self._traced_parts()[place] if type(place) is int else self._refuses()

    def _traced_parts(self) -> untold.Sequence:
        """The modules of a sequence."""
        if type(self._traced_called) is not _InOrder:
            raise Unseen
        return self._traced_called.parts


class _InOrder:
    """A sequence of modules as a function; ``parts``: as functions."""

    def __init__(self, parts: Any):
        self.parts = untold.Sequence(parts)

    def __call__(self, x: Any) -> Any:
        return functools.reduce(lambda x, one: one(x), self.parts, x)


def module_of(module: nn.Module, entered: Callable) -> Any:
    """A module as a function, or a list or dictionary of modules as one of functions; Unseen
    of those that are watched. ``entered(module, *names)``: what stands for a module where its
    code runs, ``names`` below ``module``."""
    result = _followed(module, entered)
    if not callable(result):
        return result
    return Function(module, result, functools.partial(entered, module))


def _followed(module: nn.Module, entered: Callable) -> Any:
    """`module_of`, whose text may be asked for."""
    # not asked of others, as the host need not be installed
    cls = kind(module, _KINDS)
    linear = (_is_hosts(module, "torch_geometric.nn.dense.linear.Linear")
              and "bias" in module._parameters and guards.plain(module, type(module)))
    if linear or (cls is nn.Linear and _runs_as_written(module)):
        weight, bias = (None if t is None else parameter(t) for t in (module.weight, module.bias))
        return lambda x: F.linear(x, weight, bias)  # type: ignore[arg-type]  # stand-ins
    if cls in _CONTAINERS:
        if cls is nn.Sequential and not _runs_as_written(module):
            raise Unseen
        # one that is there several times runs several times, which `named_children` leaves out
        by_name = {name: module_of(one, functools.partial(_below, entered, name))
                   for name, one in module._modules.items() if one is not None}
        if cls is nn.ModuleDict:
            return untold.Mapping(by_name)
        if cls is nn.ModuleList:
            return untold.Sequence(by_name.values())
        return _InOrder(by_name.values())
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and _is_plain_list(module):
        held = module._parameters
        if len(held) != len(module) or not all(type(one) is nn.Parameter for one in held.values()):
            raise Unseen
        tensors = {name: parameter(one) for name, one in held.items()}
        return (untold.Mapping(tensors) if isinstance(module, nn.ParameterDict)
                else untold.Sequence(tensors.values()))
    if cls in ACTIVATIONS and _runs_as_written(module):
        function = functools.partial(ACTIVATIONS[cls], module)
        in_place = getattr(module, "inplace", False)
        return functools.partial(_in_place, function) if in_place else function
    if _is_hosts_norm(module):
        return functools.partial(_through, module)
    if _runs_own_code(module) and not getattr(type(module).forward, "sums_over_edges", False):
        return entered(module)._traced_method(type(module).forward)
    raise Unseen


def _is_hosts_norm(module: nn.Module) -> bool:
    """Whether it is PyG's `LayerNorm`, which norms all rows that it gets together."""
    return (_is_hosts(module, "torch_geometric.nn.norm.layer_norm.LayerNorm")
            and guards.ordinary(module) and _runs_own_code(module))


def _is_hosts(module: nn.Module, name: str) -> bool:
    """Whether it is of the host's class of this ``name``, whose code it runs on its parameters."""
    cls = type(module)
    return (f"{cls.__module__}.{cls.__qualname__}" == name and _OWN.isdisjoint(module.__dict__)
            and own.is_method(cls.forward, cls, "forward", "torch_geometric"))


def _is_plain_list(module: nn.Module) -> bool:
    """Whether a list or dictionary of parameters is torch's own."""
    return type(module) in (nn.ParameterList, nn.ParameterDict) and _runs_as_written(module)


def _in_place(function: Callable, x: Any) -> Any:
    """A module that writes its result over what it is given."""
    result = function(x)
    return x if result is x else x.becomes(result)


def _below(entered: Callable, name: str, module: nn.Module, *names: str) -> Any:
    return entered(module, name, *names)


def _runs_own_code(module: nn.Module) -> bool:
    """Whether a call of the module is its class's ``forward``, not torch's, and nobody watches."""
    own_dict = module.__dict__
    return not (any(guards.MODULE_HOOKS(own_dict)) or "forward" in own_dict
                or type(module).__call__ is not nn.Module.__call__
                or own.home(type(module).forward) == "torch")


def _counted_rows(module: nn.Embedding) -> tuple:
    """The other options of an embedding; Unseen where it changes its weights."""
    if module.max_norm is not None:
        raise Unseen
    return None, 2.0, module.scale_grad_by_freq, module.sparse
