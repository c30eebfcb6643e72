"""Attention that users write: a ``message`` with a softmax over each node's edges, run by the
kernels of the published attention layers.

The message is traced once on stand-ins (`traced`). What it reads of the layer is noted and looked
at again in each call. Three forms are known: additive scores (GAT), a leaky ReLU of both ends' sum
(GATv2), and inner products (Transformer).
"""
from __future__ import annotations

import builtins
import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel.adapters import own
from gnnaccel.adapters.pyg import guards
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.adapters.pyg.propagate.message import _named
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen, rows
from gnnaccel.adapters.pyg.propagate.traced import ROWS, Node, Param
from gnnaccel.adapters.pyg.propagate.traced_scores import Alpha, Weighted, score_of
from gnnaccel.dispatch.ir import attention_programs as programs
from gnnaccel.dispatch.ir.program import Program
from gnnaccel.dispatch.plan.request import CallInputs, CallSpec
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

_MODULES = (torch, torch.nn, torch.nn.functional, math)
_BUILTINS = frozenset(("float", "int", "len", "None", "True", "False"))
#: what a message may name of modules, tensors and stand-ins; anything else may have effects
_NAMES = frozenset((
    "cat", "concat", "sum", "mean", "mul", "add", "sub", "div", "multiply", "neg", "matmul", "relu",
    "leaky_relu", "sigmoid", "tanh", "exp", "elu", "abs", "view", "reshape", "unsqueeze", "squeeze",
    "contiguous", "size", "dim", "dropout", "linear", "sqrt", "nn", "functional", "to", "float"))
_SPECIAL = frozenset(("index", "ptr", "size_i", "dim_size"))
_TRACES = 4  # kept for each layer
_PLAIN = (int, float, bool, str, type(None))


class Trace(NamedTuple):
    """A message, understood. ``ends``: the arguments that are features of nodes, with their end of
    the edge, in the order of the message; ``edges``: those with a row for each edge; ``read``: what
    was read of the layer, by name."""

    message: Weighted | None
    ends: tuple[tuple[str, str], ...]
    edges: tuple[str, ...]
    read: dict[str, Any]


class _Layer:
    """Stands for the layer: gives what it holds, and notes that."""

    def __init__(self, layer: Any):
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "read", {})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        self.read[name] = value
        if type(value) in _PLAIN:
            return value
        if type(value) in reading.TENSORS:
            return _parameter(value)
        if isinstance(value, nn.Module):
            self.read[name] = value, _looks(value)
            return _module(value)
        raise Unseen

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unseen


def _parameter(value: Any) -> Param:
    return Param(lambda given: value, torch.empty_like(value, device="meta"))


def _looks(module: nn.Module) -> tuple:
    """What the result of a module of `_module` depends on, by identity: its options, parameters and
    hooks, and the functions that run."""
    own_dict = module.__dict__
    return (type(module), module.training, *map(id, module._parameters.values()),
            *(v for v in own_dict.values() if type(v) in (int, float, bool)),
            any(reading.MODULE_HOOKS(own_dict)), "forward" in own_dict, type(module).forward,
            *_functions())


def _functions() -> tuple:
    """What the forward functions of such modules call."""
    return F.linear, F.leaky_relu, F.relu, F.dropout


def _runs_as_written(module: nn.Module) -> bool:
    """Whether nobody watches the module, and what it runs is torch's own."""
    own_dict = module.__dict__
    if any(reading.MODULE_HOOKS(own_dict)) or "forward" in own_dict:
        return False
    names = ("linear", "leaky_relu", "relu", "dropout")
    return (own.home(type(module).forward) == "torch"
            and all(own.is_torchs(function, name, "torch_geometric")
                    for function, name in zip(_functions(), names)))


def _module(module: nn.Module) -> Callable:
    """What a module does, as a function; Unseen of those that are not known, or watched."""
    linear = guards.plain_linear(module)
    if not linear and not _runs_as_written(module):
        raise Unseen
    if linear or type(module) is nn.Linear:
        weight, bias = (None if t is None else _parameter(t) for t in (module.weight, module.bias))
        return lambda x: F.linear(x, weight, bias)  # type: ignore[arg-type]  # stand-ins
    if type(module) is nn.LeakyReLU:
        return lambda x: F.leaky_relu(x, module.negative_slope)
    if type(module) is nn.ReLU:
        return F.relu
    if type(module) is nn.Dropout:
        return lambda x: F.dropout(x, module.p, module.training)
    raise Unseen


# --- tracing --------------------------------------------------------------------------------------

def _softmax_in_place(function: types.FunctionType) -> types.FunctionType | None:
    """``function`` with a softmax that makes an `Alpha`; None where it may do more than compute."""
    code, known = function.__code__, function.__globals__
    flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if code.co_freevars or code.co_cellvars or code.co_flags & flags:
        return None
    if any(isinstance(c, types.CodeType) for c in code.co_consts):
        return None
    found = {}
    for kind, name in _named(code):
        if kind == "LOAD_GLOBAL":
            value = known.get(name, getattr(builtins, name, None))
            if own.is_function(value, "torch_geometric", "softmax"):
                found[name] = _softmax
            elif not (any(value is one for one in _MODULES) or name in _BUILTINS
                      or (getattr(value, "__name__", "") in _NAMES and _is_torchs(value))):
                return None
        elif kind not in ("LOAD_ATTR", "LOAD_METHOD"):
            return None
    if not found:
        return None
    made = types.FunctionType(code, {**known, **found}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _is_torchs(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "torch").partition(".")[0] in ("torch", "math")


def _softmax(src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None,
             dim: int = 0) -> Alpha:
    score = score_of(src)
    if not (type(index) is _Special and index.name == "index" and dim == 0):
        raise Unseen
    for value, names in ((ptr, ("ptr",)), (num_nodes, ("size_i", "dim_size"))):
        if not (value is None or (type(value) is _Special and value.name in names)):
            raise Unseen
    return Alpha(score, score.meta)


class _Special(Refuses):
    """Stands for what message passing passes by itself."""

    def __init__(self, name: str):
        object.__setattr__(self, "name", name)

    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "__class__"):
            return object.__getattribute__(self, name)
        raise Unseen


def _trace(layer: Any, kwargs: dict) -> Trace:
    function = type(layer).message
    proxy, ends, edges = _Layer(layer), [], []
    message = _softmax_in_place(function) if type(function) is types.FunctionType else None
    if message is None or not _names_known(function.__code__, layer):
        return Trace(None, (), (), {})
    given: dict[str, Any] = {}
    try:
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            one = given[parameter.name] = _stand_in(parameter, kwargs)
            if type(one) is Node and one.end == "e":
                edges.append(parameter.name)
            elif type(one) is Node:
                ends.append((parameter.name[:-2], parameter.name[-1]))
        out = message(proxy, **given)
    except (Unseen, AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return Trace(None, (), (), proxy.read)
    return Trace(out if type(out) is Weighted else None, tuple(ends), tuple(edges), proxy.read)


def _names_known(code: types.CodeType, layer: Any) -> bool:
    return all(name in _NAMES or hasattr(layer, name) for kind, name in _named(code)
               if kind in ("LOAD_ATTR", "LOAD_METHOD"))


def _stand_in(parameter: inspect.Parameter, kwargs: dict) -> Any:
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise Unseen
    if name in _SPECIAL:
        return _Special(name)
    end = name[-1] if name[-2:] in ("_i", "_j") and name[:-2] in kwargs else "e"
    key = name if end == "e" else name[:-2]
    if key not in kwargs:
        if parameter.default is None:
            return None
        raise Unseen
    value = rows(kwargs, key, end) if end != "e" else kwargs[key]
    if value is None:
        return None
    if type(value) not in reading.TENSORS or not value.is_floating_point() or value.dim() < 1:
        raise Unseen
    meta = torch.empty(ROWS, *value.shape[1:], dtype=value.dtype, device="meta")
    if end == "e":
        return Node("e", lambda given: given[key], meta)
    return Node(end, lambda given: rows(given, key, end), meta)


_traces: IdentityMap[list[tuple]] = IdentityMap()  # by layer


def trace(layer: Any, known: reading.Known, kwargs: dict) -> Trace:
    """What the layer's message computes of such arguments, looked at again where anything that it
    read has changed. ``known``: its class."""
    key = known, tuple([(name, _form(value)) for name, value in kwargs.items() if name != "size"])
    kept = _traces.get(layer)
    if kept is None:
        kept = []
        _traces.set(layer, kept)
    for seen, found in kept:
        if seen == key and all(_as_read(layer, *one) for one in found.read.items()):
            return found
    found = _trace(layer, kwargs)
    kept[:] = [(key, found), *(one for one in kept if one[0] != key)][:_TRACES]
    return found


#: the host's own classes, of which none has such a message
of_the_host: set[type] = set()


def read(layer: Any, kwargs: dict) -> OwnAttention | None:
    """The call, if the layer's message is such attention."""
    known = reading.known_class(type(layer))
    if known.own:
        of_the_host.add(type(layer))
    if (known.own or known.why is not None
        or type(known.form(kwargs, known.stamp(layer))) is not Reason):
        return None
    found = trace(layer, known, kwargs)
    return None if found.message is None else OwnAttention(found, known)


def _form(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return (value.shape[1:], value.dtype) if isinstance(value, Tensor) else type(value)


def _as_read(layer: Any, name: str, seen: Any) -> bool:
    value = getattr(layer, name, Unseen)
    if type(seen) is tuple and isinstance(seen[0], nn.Module):
        return value is seen[0] and _looks(value) == seen[1]
    return value is seen or (type(value) is type(seen) and type(value) in _PLAIN and value == seen)


# --- the call -------------------------------------------------------------------------------------

class OwnAttention:
    """One call with such a message, as an adapter of the router. ``args``: the ``edge_index``;
    ``kwargs``: everything else that ``propagate`` is given."""

    host = "pyg"

    def __init__(self, found: Trace, known: reading.Known):
        self.found, self.known = found, known

    def key(self, layer: Any, args: tuple, kwargs: dict) -> None:
        """None: every call is stated."""

    def state(self, layer: Any, args: tuple, kwargs: dict) -> tuple[CallSpec, CallInputs] | Reason:
        found, known = self.found, self.known
        why = (guards.context_reason() or reading.layer_reason(layer, known)
               or reading._update_reason(known, kwargs))
        if why is not None:
            return why
        if reading.reductions(layer, known) != ("sum",) or known.aggregate is not None:
            return reason("GA201", "attention is added up")
        if layer.flow != "source_to_target":
            return reason("GA202", "attention against the flow")
        return _stated(layer, args[0], kwargs, found, known)

    def run(self, layer: Any, stated: CallSpec, given: CallInputs, attend: Any) -> Any:
        (kwargs,), message = given.extra, self.found.message
        assert message is not None
        tensors = _tensors(message, stated, kwargs)
        # contiguous, as the host's is: a layer's own code may take views of it
        out = attend(tensors).contiguous().view(stated.num_dst, *message.meta.shape[1:])
        return reading.finished(layer, self.known, False, out, kwargs)


def _stated(layer: Any, edge_index: Any, kwargs: dict, found: Trace,
            known: reading.Known) -> tuple[CallSpec, CallInputs] | Reason:
    message: Any = found.message  # not None
    sizes = reading.sizes(layer, edge_index, kwargs, found.ends)
    if type(sizes) is Reason:
        return sizes
    first = next(rows(kwargs, name, end) for name, end in found.ends if end == "j")
    if reading.stacked(layer, first) or torch.is_autocast_enabled(first.device.type):
        return reason("GA206", "attention over stacked features, or under autocast")
    plain = reading._edges(layer, known, edge_index, *sizes, first.device)
    if type(plain) is Reason:
        return plain
    used = [rows(kwargs, *one) for one in found.ends] + [kwargs[name] for name in found.edges]
    for value in used:
        if value.is_neg() or value.device != first.device or value.dtype != first.dtype:
            return reason("GA206",
                          "features are yet to be negated, or of several devices or dtypes")
    for name in found.edges:
        if kwargs[name].shape[0] != plain.shape[1]:
            return reason("GA206", f"{name} has {kwargs[name].shape[0]} rows for "
                          f"{plain.shape[1]} edges")
    heads = message.alpha.meta.numel() // ROWS
    width = message.values.meta.numel() // ROWS // heads
    row = message.values.meta.dtype
    if row != first.dtype:
        return reason("GA203", f"messages of {row} from features of {first.dtype}")
    program, native = _program(message)
    stated = CallSpec(program, native, heads, width, row, row, *sizes, plain.shape[1], 0, False)
    x = rows(kwargs, found.ends[0][0], found.ends[0][1])
    return stated, CallInputs(x, x, plain, None, (kwargs,))


def _program(message: Weighted) -> tuple[Program, str]:
    """The Program, and the host's layer that costs as much."""
    score, dropout = message.alpha.score, message.alpha.dropout
    if score.kind == "terms":
        parts = score.of["ends"].parts
        return (programs.additive_terms(score.of["slope"], dropout, "i" in parts, "e" in parts),
                "GATConv")
    if score.kind == "gatv2":
        return programs.gatv2(score.of["slope"], dropout, False), "GATv2Conv"
    return programs.dot_product(score.scale, dropout, False), "TransformerConv"


def _tensors(message: Weighted, stated: CallSpec, kwargs: dict) -> dict[str, Tensor]:
    score, h, c = message.alpha.score, stated.heads, stated.width

    def of(node: Node, *shape: int) -> Tensor:
        return node.make(kwargs).reshape(-1, *shape).contiguous()

    if score.kind == "terms":
        names = {"j": "a_src", "i": "a_dst", "e": "a_edge"}
        parts = score.of["ends"].parts
        return {"x": of(message.values, h, c),
                **{names[end]: of(part, h) for end, part in parts.items()}}
    if score.kind == "gatv2":
        parts = score.of["ends"].parts
        att = score.of["att"].make(kwargs).expand(1, *parts["j"].meta.shape[1:]).reshape(h, c)
        return {"keys": of(parts["j"], h, c), "queries": of(parts["i"], h, c), "att": att}
    return {"keys": of(score.of["keys"], h, c), "queries": of(score.of["queries"], h, c),
            "values": of(message.values, h, c)}
