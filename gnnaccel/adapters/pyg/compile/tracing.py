"""Code that Dynamo traces in the place of a layer's ``forward``.

Options are read in traced code, so Dynamo guards on them. The rest, such as the user's rules and
hooks, is looked at once, on the layer itself, when it is traced (`_look`).
"""
from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.own import home
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.adapters.pyg.compile import described
from gnnaccel.adapters.pyg.compile.kinds import KINDS
from gnnaccel.dispatch.observe import counters, decisions, records
from gnnaccel.dispatch.plan.planner import native_plan
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy import rules
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.uncompiled import kept_apart

#: classes without an adapter, whose ``forward`` is replaced for the compiler's sake alone
PLAIN = ("GCNConv", "SAGEConv", "GraphConv", "GINConv", "GINEConv", "SGConv", "TAGConv", "APPNP")
_HOST = "torch_geometric."
#: classes in which PyG keeps modules of a layer
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ReLU)
_AGGREGATIONS = {"add": "Sum", "sum": "Sum", "mean": "Mean", "max": "Max", "min": "Min"}
#: methods of message passing that a call may run
STEPS = ("propagate", "edge_updater", "message", "aggregate", "update", "message_and_aggregate",
         "edge_update")
#: whether torch is no older than the first version tested; older ones carry nothing
POSSIBLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)


def asked(patches: PatchSet) -> None:
    """Put the forward of `PLAIN` in or out, as the configurations ask."""
    from torch_geometric import nn

    wanted = configs.compiling and POSSIBLE
    if wanted:
        importlib.import_module("gnnaccel.adapters.pyg.compile.operators")
    for name in PLAIN:
        cls = getattr(nn, name)
        if wanted and not patches.holds(cls, "forward"):
            patches.set(cls, "forward", _plain(cls),
                        "Gives torch.compile one operator in the place of the layer's own code.",
                        active="While `enable(compile=True)` holds anywhere.")
        elif not wanted:
            patches.undo(cls, "forward")


def _plain(cls: type[Any]) -> Callable:
    from torch.compiler import is_compiling

    native: Callable = cls.forward
    inside: Any = carried(cls)

    @kept_apart
    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (inside(native, self, args, kwargs) if is_compiling()
                else native(self, *args, **kwargs))

    return forward


def carried(cls: type) -> Callable | None:
    """``inside(native, layer, args, kwargs)``, a call in code that is compiled, of a class whose
    calls can be operators; None for any other class."""
    name = cls.__name__
    if name not in KINDS or not POSSIBLE:
        return None
    kind, methods = KINDS[name], _methods(cls)

    @kept_apart
    def inside(native: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        if not configs.compiling or not torch.compiler.is_dynamo_compiling():
            return native(layer, *args, **kwargs)
        why = _layers_reason(layer, cls, methods)
        if why != "":
            return _native(native, layer, args, kwargs, name, why)
        call = described.describe(kind, layer, args, kwargs)
        if isinstance(call, str):
            return _native(native, layer, args, kwargs, name, call)
        why = described.reason_of(call)
        if why != "":
            return _native(native, layer, args, kwargs, name, why)
        out = operator(name, layer.training, call)
        if kind.by_type:
            return _split(out, call.types)
        return out if kind.after is None else getattr(layer, kind.after)(out)

    return inside


def operator(name: str, training: bool, found: described.Described) -> Any:
    """The call as an operator."""
    from gnnaccel.adapters.pyg.compile import operators  # defined when they are asked for

    names, lent, tensors = [], [], []
    for key, tensor in (*found.inputs, *found.parameters):
        names.append(key)
        lent.append(not _of_the_caller(tensor))
        tensors.append(tensor.detach() if key in found.unused else tensor)
    options = tuple((key, _fixed(value)) for key, value in found.options)
    call = repr((name, training, options, len(found.inputs), tuple(names), tuple(lent),
                 _number() if found.random else 0))
    return operators.layer(call, tensors[0], tensors[1:], found.rows, found.width)


def _split(out: Any, types: list) -> dict:
    """The results by type, whose rows lie one after the other in ``out``."""
    parts, start = {}, 0
    for name, rows in types:
        parts[name] = out[start:start + rows]
        start = start + rows
    return parts


def _native(native: Callable, layer: Any, args: tuple, kwargs: dict, name: str, why: str) -> Any:
    _told(name, why)
    return native(layer, *args, **kwargs)


def _layers_reason(layer: Any, cls: Any, methods: tuple[str, ...]) -> str:
    """Why this layer is traced as the host's own code; "" where it need not be."""
    if (type(layer) is not cls or layer.flow != "source_to_target" or layer._explain
            or layer._decomposed_layers != 1 or layer.node_dim not in (0, -2)):
        return "it is a subclass, explained, decomposed, or of another flow or node_dim"
    read_methods(layer, methods)
    _read_maps(layer, KINDS[cls.__name__].after)
    why = aggregation_reason(layer)
    if why != "":
        return why
    from torch._dynamo.comptime import comptime  # which is there while it is traced

    comptime(_look)
    return seen_now()


def _methods(cls: Any) -> tuple[str, ...]:
    """The methods that a call by the layer's own code may run."""
    own = tuple(name for name, value in vars(cls).items()
                if inspect.isfunction(value) and not name.startswith("__"))
    return tuple(dict.fromkeys((*STEPS, *own)))


def read_methods(layer: Any, names: tuple[str, ...]) -> None:
    """Read methods in traced code, so that Dynamo guards on those of the object, which may have
    others than its class, and on those of the class, which are guarded once something is done with
    them."""
    cls = type(layer)
    for name in names:
        getattr(layer, name)
        callable(getattr(cls, name))


def _read_maps(module: Any, but: str | None) -> None:
    """`read_methods` for ``forward`` of the modules in this one, but for the one named ``but``."""
    for name, inner in module._modules.items():
        if inner is not None and name != but:
            read_methods(inner, ("forward",))
            _read_maps(inner, None)


def aggregation_reason(layer: Any) -> str:
    """Why the layer aggregates otherwise than its ``aggr`` says, where that is a simple name.
    Traced, too."""
    aggr = layer.aggr
    if (isinstance(aggr, str) and aggr in _AGGREGATIONS
        and type(layer.aggr_module).__name__ != _AGGREGATIONS[aggr] + "Aggregation"):
        return f"its aggregation is not {aggr}"
    return ""


# --- what is looked at while it is traced ---------------------------------------------------------

_seen: list[Any] = [""]
_by_rule: dict[str, Reason] = {}  # reasons of the user's own rules, by text
_counted = 0


def local(ctx: Any, name: str) -> Any:
    """The object that is a local variable of the code that looks; None where the compiler does not
    show it."""
    variable = ctx.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    return getattr(variable, "value", None)


def saw(value: Any) -> None:
    """Set the value that `seen_now` gives next."""
    _seen[0] = value


def _look(ctx: Any) -> None:
    """Look for reasons against the layer that is the local variable ``layer``."""
    layer = local(ctx, "layer")
    saw("the compiler does not show it" if layer is None
        else context_reason(layer) or _changed_reason(layer))


def context_reason(layer: Any) -> str:
    """Why no call of the layer is carried here, whatever it computes."""
    config = configs.current()
    if config is None or not config.compile:
        return "enable(compile=True) does not hold here"
    if torch.compiler.is_exporting():
        return "torch.export takes the host's own code"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform is going on"
    verdict = rules.verdict(layer, config)
    if not verdict.inside:
        _by_rule[str(verdict.reason)] = verdict.reason  # type: ignore[assignment]  # it is outside
        return str(verdict.reason)
    if settings.asked(layer, config) is not None or settings.maps_asked():
        return "reduced precision is asked for"
    return ""


def _changed_reason(layer: Any) -> str:
    """Why the layer does more than its class and options say."""
    from gnnaccel.adapters.pyg import guards

    own = layer.__dict__
    if any(own.get(name) for name in guards.HOOKS):
        return "hooks are registered"
    kind = KINDS[type(layer).__name__]
    containers = (*_CONTAINERS, torch.nn.Sequential) if kind.sequences else _CONTAINERS
    for name, module in own["_modules"].items():
        if module is None or name == kind.after:
            continue
        for inner in module.modules():
            if (guards.has_hooks(inner) or "forward" in inner.__dict__
                    or not (type(inner).__module__.startswith(_HOST) or type(inner) in containers)):
                return f"{name} is more than PyG's own"
    for name, value in own.items():
        if callable(value) and callable(getattr(type(layer), name, None)):
            if getattr(value, "__func__", None) is not getattr(type(layer), name):
                return f"{name} is replaced on the layer object"
    for name in _methods(type(layer)):
        if home(getattr(type(layer), name)) != "torch_geometric":
            return f"{name} is replaced on the class"
    return ""


def _look_at_tensor(ctx: Any) -> None:
    """Look whether the local variable ``tensor`` is an input of the compiled code, and
    unwritten."""
    variable = ctx.get_local("tensor")._i_will_not_complain_if_bc_breaks_VariableTracker()
    value = variable.as_proxy().node.meta.get("example_value")
    _seen[0] = variable.source is not None and value is not None and value._version == 0


def _of_the_caller(tensor: Any) -> bool:
    """Whether nothing but the caller writes to the tensor's memory. All else may lie in memory that
    the compiler uses again while the layer's tensors, or its graph's structure, are still kept."""
    from torch._dynamo.comptime import comptime

    comptime(_look_at_tensor)
    return seen_now()


def _fix(ctx: Any) -> None:
    """Read the local variable ``value`` as it is now; Dynamo guards on it from then on."""
    variable = ctx.get_local("value")._i_will_not_complain_if_bc_breaks_VariableTracker()
    variable = variable.realize()
    _seen[0] = (variable.as_python_constant() if variable.is_python_constant()
                else variable.evaluate_expr())


def _fixed(value: Any) -> Any:
    """``value`` as a constant: the compiler may have made a number a variable of the compiled
    code."""
    if isinstance(value, (bool, str, tuple)) or value is None:
        return value
    from torch._dynamo.comptime import comptime

    comptime(_fix)
    return seen_now()


def seen_now() -> Any:
    """The value seen last: a constant of the traced code."""
    return _seen[0]


def _told(name: str, text: str) -> None:
    """Report a call that was traced natively: once, whenever it is compiled."""
    config = configs.current()
    why = _by_rule.get(text) or reason("GA404", text)
    counters.count(name, "native", why.code)
    plan = native_plan((name, why))
    if records.listening():
        decisions.forward(decisions.Subject("pyg", name), plan, None, "none", 0.0)
    if config is not None and config.on_fallback != "native" and text not in _by_rule:
        decisions.object_to(name, config.on_fallback, plan.rejected)


def _number() -> int:
    """A new number for each call that draws random numbers: the compiler makes one call of equal
    ones."""
    global _counted
    _counted += 1
    return _counted


_run_while_traced: tuple[Any, ...] = (seen_now, _told, _number)
for _function in _run_while_traced:
    _function._dynamo_marked_constant = True
