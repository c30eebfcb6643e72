"""Code that Dynamo traces in the place of ``propagate`` of classes that have no adapter, a user's
own among them.

Where a message is a copy of the source's features, or those times something of the edge, the call
is the operator of a `SimpleConv` with weights. These are the message of ones, traced by Dynamo like
any function.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters.pyg.compile import described, tracing
from gnnaccel.adapters.pyg.propagate import reading, reductions
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.reasons import Reason

_OTHER = "its message is not a copy of features, times something of the edge"


def inside(native: Callable, layer: Any, edge_index: Any, args: tuple, kwargs: dict) -> Any:
    """A call of ``propagate`` in code that is compiled."""
    if (not args and configs.compiling and tracing.POSSIBLE
        and torch.compiler.is_dynamo_compiling()):
        call = _described(layer, edge_index, kwargs)
        if not isinstance(call, str) and described.reason_of(call) == "":
            return tracing.operator("SimpleConv", layer.training, call)
    return native(layer, edge_index, *args, **kwargs)


def _described(layer: Any, edge_index: Any, kwargs: dict) -> described.Described | str:
    """The call, or why it is not carried."""
    if (layer.flow != "source_to_target" or layer._explain or layer._decomposed_layers != 1
        or layer.node_dim not in (0, -2) or not isinstance(layer.aggr, str)
        or type(edge_index) not in described.TENSORS or edge_index.dim() != 2
        or kwargs.get("size") is not None):
        return "it is explained, decomposed, of another flow, aggregation or size"
    tracing.read_methods(layer, tracing.STEPS)
    why = tracing.aggregation_reason(layer)
    if why != "":
        return why
    kinds: tuple = ()
    for name in kwargs:
        if name != "size":
            kinds = (*kinds, (name, _kind(kwargs[name])))
    form = _form(layer, kinds)
    if isinstance(form, str):
        return form
    source, weighted, names = form
    inputs = described.features(kwargs[source])
    if isinstance(inputs, str):
        return inputs
    x, last = inputs[0][1], inputs[-1][1]
    if x.dim() != 2 or last.dim() != 2:
        return "features are not of shape [N, F]"
    inputs = [*inputs, ("edge_index", edge_index)]
    if weighted:
        ones = torch.ones((edge_index.shape[1], 1), dtype=x.dtype, device=x.device)
        weight = layer.message(**{name: ones if name == source + "_j" else kwargs.get(name)
                                  for name in names})
        if weight.dim() != 2 or weight.shape[1] != 1:
            return "there are several weights for an edge"
        inputs = [*inputs, ("edge_weight", weight[:, 0])]
    return described.Described((("aggr", layer.aggr), ("combine_root", None)), inputs, [],
                               last.shape[0], x.shape[1], unused=("x1",))


def _kind(value: Any) -> str:
    """The kind of an argument in the words of `reading`."""
    if value is None:
        return "none"
    return "tensor" if type(value) in (*described.TENSORS, tuple) else "other"


def _form(layer: Any, kinds: tuple) -> Any:
    """The features' name, whether there are weights, and the names that the message takes; or why
    the call is not carried."""
    from torch._dynamo.comptime import comptime  # which is there while it is traced

    comptime(_look)
    return tracing.seen_now()


def _look(ctx: Any) -> None:
    """Look at the local variables ``layer`` and ``kinds``, for `_form`."""
    layer = tracing.local(ctx, "layer")
    kinds = ctx.get_local("kinds")._i_will_not_complain_if_bc_breaks_VariableTracker()
    tracing.saw("the compiler does not show it" if layer is None
                else tracing.context_reason(layer)
                or _read(layer, dict(kinds.as_python_constant())))


def _read(layer: Any, kinds: dict[str, str]) -> Any:
    layer_class = reading.known_class(type(layer))
    if (layer_class.why is not None or layer_class.updates
            or not (layer_class.stock is layer_class.aggregate is None)):
        return _OTHER
    shown = {"none": None, "tensor": (), "other": ""}  # which `reading` takes for these kinds
    form = layer_class.form({name: shown[kind] for name, kind in kinds.items()}, None)
    if (type(form) is Reason or form.more is not None or form.apply is not None or form.ends
        or form.width is not None):
        return _OTHER
    why = reading.layer_reason(layer, layer_class, reductions.of(layer, layer_class))
    if why:
        return str(why)
    names = tuple(inspect.signature(layer_class.functions[0]).parameters)[1:]
    return form.source, form.weight is not None, names
