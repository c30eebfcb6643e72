"""One call of ``propagate``, read as an aggregation over a graph; or why it is none."""
from __future__ import annotations

import functools
import inspect
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.guards import TENSORS as TENSORS
from gnnaccel.adapters.own import FUNCTION, GATHERS, MESSAGE_PASSING, Path, home, is_method
from gnnaccel.adapters.pyg import edges, guards
from gnnaccel.adapters.pyg.propagate import (adjacency, node_counts, own_aggregations, reductions,
                                             stock)
from gnnaccel.adapters.tracing import message
from gnnaccel.adapters.tracing.code import defaults
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.ops import aggregation, aggregation_means as means
from gnnaccel.dispatch.ops.aggregation import Aggregation, Reduce
from gnnaccel.dispatch.ops.graph import OpGraph, ProductGraph
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

SETTINGS = itemgetter("_explain", "_decomposed_layers", "flow", "node_dim")
HOOKS = itemgetter(*guards.HOOKS)
#: methods that must not be replaced on a layer object
OVERRIDES = frozenset(MESSAGE_PASSING)
#: reasons of a message without a form, or of one whose tensors do not fit it
NO_FORM = ("GA206", "GA208", "GA211")
_FUNCTIONS = ("message", "aggregate", "update", "message_and_aggregate")


class Known:
    """Facts about a class's functions.

    They hold as long as these and all functions on their ``path`` stay the same. ``updates``:
    whether ``update`` does something; ``update``: its arguments. ``of_user``: ``aggregate`` is the
    user's own; ``traced``: it was traced (`aggregates`), and ``aggregate`` is what that found;
    ``gathers``: those of `GATHERS` that this PyG has.
    """

    why: Reason | None
    update: tuple[str, ...]

    def __init__(self, cls: type, traced: stock.Aggregate | None = None):
        self.functions = tuple(getattr(cls, name) for name in _FUNCTIONS)
        self.path = Path("torch_geometric")
        self.gathers = tuple(name for name in GATHERS if hasattr(cls, name))
        self.path.watch(attrgetter, cls, (*_FUNCTIONS, *self.gathers))
        self.forms: dict[tuple, message.Form | Reason] = {}
        self.own = cls.__module__.startswith("torch_geometric.")
        self.stock = stock.of_message(self.functions[0])
        self.aggregate, self.traced = stock.of_aggregate(self.functions[1]), traced is not None
        self.of_user = self.aggregate is None and home(self.functions[1]) != "torch_geometric"
        self.updates = not is_method(self.functions[2], base(), "update", "torch_geometric")
        for function, entry in zip(self.functions, (self.stock, self.aggregate)):
            if entry is not None:
                self.path.function(function)
        for function in self.functions[:1 + self.of_user]:
            message.watch(self.path, function)
        for function in self.functions:
            # whose code a notebook may reload in place
            if home(function) not in ("", "torch_geometric"):
                self.path.watch(_written_getter if function.__kwdefaults__ else attrgetter,
                                function, FUNCTION)
        self.aggregate = traced or self.aggregate
        self.why, self.update = (_functions_reason(cls, self),
                                 _update_arguments(self)  # type: ignore[assignment]  # or `why`
                                 if self.updates else ())
        changed = self.path.complete().why  # whatever else there is: it is what `same` compares
        self.why = self.why or changed

    def stamp(self, layer: Any) -> tuple | None:
        """Properties of the layer that a form depends on."""
        if self.aggregate is not None:
            return self.aggregate.reduces(layer)
        return None if self.stock is None else self.stock.stamp(layer)

    def form(self, kwargs: dict, stamp: tuple | None) -> message.Form | Reason:
        """Form of the message for such arguments, in a layer with this `stamp`."""
        if self.why is not None:
            return self.why
        kinds = {name: _kind(value) for name, value in kwargs.items() if name != "size"}
        key = (stamp, *kinds.items())
        if key not in self.forms:
            result = (message.form(self.functions[0], kinds)
                      if self.stock is None
                      else self.stock.form(stamp, kinds))  # type: ignore[arg-type]
            own = self.aggregate
            if own is not None and own.weight is not None and type(result) is message.Form:
                result = _weighted_by(result, own.weight, kinds)
            self.forms[key] = (result or (
                reason("GA208", "its message has a form that is not recognised") if self.own else
                reason("GA211", "message has a form that is not recognised")))
        return self.forms[key]


def _weighted_by(form: message.Form, name: str, kinds: dict[str, str]) -> message.Form | None:
    """``form`` with the weights of a class's own ``aggregate``."""
    if form.weight is not None or form.more is not None:
        return None
    return (form
            if kinds.get(name) != "tensor"
            else form._replace(weight=lambda given: given[name].view(-1, 1)))


def _written_getter(*names: str) -> Any:
    """`attrgetter` of a function whose defaults are in a dictionary, which may be written to."""
    get = attrgetter(*names)
    return lambda function: [dict(one) if type(one) is dict else one for one in get(function)]


_classes: IdentityMap[Known] = IdentityMap(256)  # which know their functions


def known_class(cls: type) -> Known:
    """`Known` of a class; one object for as long as its functions are the same."""
    known = _classes.get(cls)
    if known is not None and known.path.same():
        return known
    known = Known(cls)
    _classes.set(cls, known)
    return known


@functools.cache
def base() -> type[Any]:
    """PyG's MessagePassing."""
    from torch_geometric.nn import MessagePassing

    return MessagePassing


def _functions_reason(cls: type, known: Known) -> Reason | None:
    aggregate = known.functions[1]
    for name in known.gathers:
        if not is_method(getattr(cls, name), base(), name, "torch_geometric"):
            return reason("GA205", f"{cls.__name__} overrides {name}")
    if known.of_user and not known.traced:
        return reason("GA211", "aggregate is the user's own")
    if known.aggregate is None and not is_method(aggregate, base(), "aggregate", "torch_geometric"):
        return reason("GA208", f"{cls.__name__} aggregates in its own way")
    if known.updates and _update_arguments(known) is None:
        return reason("GA211", "update takes what belongs to edges, or to one of their ends")
    return None


def _update_arguments(known: Known) -> tuple[str, ...] | None:
    """The arguments of ``propagate`` that a class's ``update`` takes; None if it takes others."""
    names = []
    for parameter in list(inspect.signature(known.functions[2]).parameters.values())[2:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            return None
        if parameter.name[-2:] in ("_i", "_j") or (
            parameter.name in {*base().special_args, "self"} - {"edge_index"}):
            return None
        names.append(parameter.name)
    return tuple(names)


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    return "tensor" if isinstance(value, (Tensor, tuple, list)) else "other"


def storable(layer: Any) -> Reason | bool:
    """`gnnaccel.adapters.storable`, by what is known without a call."""
    why = known_class(type(layer)).why
    if why is None and known_class(type(layer)).aggregate is not None:
        why = reason("GA603", "it aggregates in its own way")
    name = type(layer.aggr_module).__name__
    if why is None and reductions.BY_NAME.get(name) not in ("sum", "mean"):
        why = reason("GA603", f"the aggregation is {name}, not a sum or a mean")
    return True if why is None else reason("GA603", why.text)


# --- reading a call -------------------------------------------------------------------------------

class Read(NamedTuple):
    """A call, understood. ``reduces``: of all aggregations side by side; ``given`` is the first.
    ``matrix``: of a call over a sparse matrix."""

    graph: OpGraph
    given: Aggregation
    form: message.Form
    known: Known
    reduces: tuple[Reduce, ...]
    matrix: adjacency.Matrix | None = None


def read(layer: Any, edge_index: Any, kwargs: dict) -> Read | Reason:
    """The call as an aggregation, or why it is none; `completing.completed` computes all of it."""
    from gnnaccel.adapters.pyg.propagate import aggregates  # which needs this module

    known = known_class(type(layer))
    if aggregates.own(layer, known):
        return aggregates.read(layer, known, edge_index, kwargs)
    if adjacency.is_matrix(edge_index):
        matrix = known.why or adjacency.read(layer, known, edge_index, kwargs)
        if type(matrix) is Reason:
            return matrix
        call = read_as(matrix.form, layer, matrix.edges, matrix.arguments, known,
                       ProductGraph if matrix.path is not None else OpGraph)
        return call if type(call) is Reason else call._replace(matrix=matrix)
    return read_edges(layer, edge_index, kwargs, known)


def read_edges(layer: Any, edge_index: Any, kwargs: dict, known: Known) -> Read | Reason:
    """`read`, of a call that is not over a sparse matrix."""
    from gnnaccel.adapters.pyg.propagate import aggregates, generated  # which need this module

    form = known.form(kwargs, known.stamp(layer))
    if type(form) is message.Form and form.summed:
        form = generated.not_summed(form, layer, kwargs, edge_index, known)
    call = form if type(form) is Reason else read_as(form, layer, edge_index, kwargs, known)
    if type(call) is Reason and call.code in NO_FORM:
        if (known.aggregate is None and generated.serves(kwargs)
            and own_aggregations.is_softmax(layer.aggr_module)):
            of_softmax = aggregates.read(layer, known, edge_index, kwargs)
            if type(of_softmax) is Read:
                return of_softmax
        generated_form = generated.form(layer, known, kwargs, edge_index, call)
        if type(generated_form) is message.Form:
            return read_as(generated_form, layer, edge_index, kwargs, generated_form.known or known)
        call = guards.context_reason() or call
    return call


def read_as(form: message.Form, layer: Any, edge_index: Any, kwargs: dict, known: Known,
            graph_class: type[OpGraph] = OpGraph) -> Read | Reason:
    """`read`, of messages of this form."""
    from gnnaccel.adapters.pyg.propagate import completing  # which needs this module

    reduces = reductions.of(layer, known)
    why = (guards.context_reason() or layer_reason(layer, known, reduces)
           or _update_reason(layer, known, edge_index, kwargs))
    if why is not None:
        return why
    if form.of_edges:
        sizes = node_counts.of_edges(layer, edge_index, kwargs, form.ends)
    else:
        sizes = node_counts.sizes(layer, edge_index, kwargs, ((form.source, "j"), *form.ends))
    if type(sizes) is Reason:
        return sizes
    x, (num_src, num_dst) = source(kwargs, form.source), sizes
    if x.dtype in stock.HALF and stock.divides(type(layer)):
        return reason("GA203", f"{x.dtype} features, divided by sums in 16 bits")
    plain = _edges(layer, known, edge_index, num_src, num_dst, x.device)
    if type(plain) is Reason:
        return plain
    weight = None if form.weight is None else form.weight(kwargs)
    if len(reduces) > 1 and stacked(layer, x):
        return reason("GA206", f"several aggregations over features of shape {list(x.shape)}")
    for one in reduces:
        why = means.unfit(one, x, weight, form.more is not None)
        if why is not None:
            return why
    first = prepared(reduces[0], layer, x, weight, plain.shape[1])
    if type(first) is Reason:
        return first
    graph = graph_class(plain, num_src, num_dst, layer.flow != "source_to_target")
    if form.more is not None:
        first = completing.with_more(layer, form, graph, first, kwargs, form.costly)
        if type(first) is Reason:
            return first
    return Read(graph, first, form, known, reduces)


def source(kwargs: dict, name: str) -> Any:
    """The features that are gathered; of a pair the first."""
    x = kwargs[name]
    return x[0] if isinstance(x, (tuple, list)) else x


def stacked(layer: Any, x: Tensor) -> bool:
    """Whether nodes do not come first: [*stacks, nodes, features]."""
    return layer.node_dim % x.dim() != 0


def moved(layer: Any, form: message.Form, kwargs: dict) -> bool:
    """Whether results are to be moved to where the layer has nodes."""
    if form.stacked is not None:
        return form.stacked
    x = kwargs[form.source]  # as `source`, in each call
    return layer.node_dim % (x[0] if isinstance(x, (tuple, list)) else x).dim() != 0


def prepared(reduce: Reduce, layer: Any, x: Tensor, weight: Tensor | None,
             count: int) -> Aggregation | Reason:
    """The aggregation with nodes, and edges, in the first dimension."""
    if stacked(layer, x):
        if weight is not None and weight.dim() <= x.dim():
            weight = (weight[(None,) * (x.dim() - weight.dim())].movedim(layer.node_dim, 0)
                      if weight.dim() > 1 else weight)
        x = x.movedim(layer.node_dim, 0)
    return aggregation.prepare(reduce.partition(" ")[0] if type(reduce) is str else reduce, x,
                               weight, count)


def layer_reason(layer: Any, known: Known, reduces: tuple[Reduce, ...]) -> Reason | None:
    """Why this layer object's messages, or its `reductions`, are not what its class says."""
    own = layer.__dict__
    if any(HOOKS(own)):
        return reason("GA501", "message-passing hooks are registered")
    explain, decomposed, _, _ = SETTINGS(own)
    if explain:
        return reason("GA502")
    if decomposed != 1:
        return reason("GA503", f"decomposed_layers={decomposed}")
    if not own.keys().isdisjoint(OVERRIDES):
        return reason("GA205", "a method is replaced on the layer object")
    module = own["_modules"].get("aggr_module")
    if guards._any_global_hook():
        return reason("GA501", "hooks on all modules are registered")
    if reduces and known.aggregate is None:  # of a module without a reason
        return None
    why = None if module is None else guards.reducing_reason(module)
    if why is not None or reduces:
        return why
    return reason("GA201",
                  "the aggregation is "
                  f"{type(module).__name__ if known.aggregate is None else layer.aggregators}")


def _update_reason(layer: Any, known: Known, edge_index: Any, kwargs: dict) -> Reason | None:
    given = {*kwargs, "edge_index"} if type(edge_index) is Tensor else kwargs
    missing = tuple([name for name in known.update if name not in given])
    return (None if not missing or defaults.are_given(layer, known.functions[2], missing) else
            reason("GA211", f"update takes {', '.join(missing)}, which propagate was not given"))


def _edges(layer: Any, known: Known, edge_index: Any, num_src: int, num_dst: int,
           device: torch.device) -> Tensor | Reason:
    if type(edge_index) is EdgeArrays:  # of a sparse matrix; asked for what a tensor is
        return (edge_index if edge_index.device == device  # type: ignore[return-value]
                else reason("GA204",
                            f"edges are on {edge_index.device}, the features on {device}"))
    special = type(edge_index) is not Tensor
    if special and layer.fuse and home(known.functions[3]) != "torch_geometric":
        return reason("GA211", "message_and_aggregate is the user's own")
    if layer.flow != "source_to_target":
        return (reason("GA204", "an EdgeIndex with flow='target_to_source'")
                if special else edges.plain(edge_index, num_dst, num_src, device))
    return edges.plain(edge_index, num_src, num_dst, device)


def finished(layer: Any, known: Known, moved: bool, out: Any, kwargs: dict, edges: Any) -> Any:
    """What the call gives: the class's own ``update`` of the result, of several combined.
    ``moved``: features were `stacked`; ``edges``: the caller's list of edges."""
    if known.aggregate is not None:
        out = known.aggregate.combine(layer, out if type(out) is list else [out], kwargs)
    elif type(out) is list:
        out = layer.aggr_module.combine(out)
    if moved:
        out = out.movedim(0, layer.node_dim).contiguous()
    if not known.updates:
        return out
    given = {name: edges if name == "edge_index" else kwargs[name] for name in known.update
             if name in kwargs or name == "edge_index"}
    return layer.update(out, **given)
