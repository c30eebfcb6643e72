"""The functions of ``dgl.core`` that run functions of users, behind the router for operations.

``update_all`` and the like call ``message_passing``. Where both functions are followed, the
whole call is one operation. Otherwise the host's own code goes on, which makes messages
(``invoke_edge_udf``, which ``apply_edges`` calls as well) and reduces mailboxes
(``invoke_udf_reduce``), each of which may still be followed by itself.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from gnnaccel.adapters import own
from gnnaccel.adapters.dgl import graphs
from gnnaccel.adapters.dgl.ops import calls
from gnnaccel.adapters.dgl.ops.replaced import layers
from gnnaccel.adapters.dgl.udf import messages as messages_
from gnnaccel.adapters.guards import context_reason, inference_reason, subclass_reason
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.cuda.runtime import driver
from gnnaccel.dispatch.ops import route
from gnnaccel.dispatch.ops.call import OpCall
from gnnaccel.dispatch.ops.graph import OpGraph
from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.policy.config import Config, current
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason, reason
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.dispatch.uncompiled import kept_apart, uncompiled

_MESSAGES, _MAILBOXES = "dgl.message_udf", "dgl.reduce_udf"  # names in the counters
_FEW = 1000  # edges, below which messages gain nothing on a CPU
_AGAIN = 50  # calls that a message function stays native for, once it gained nothing on a CPU
#: by code: why it gained nothing, how many native calls are left, and with which message, if a
#: reduce function's call with others may gain
_no_gain: IdentityMap[list[Any]] = IdentityMap()
_NOT_FOLLOWED = "the message or reduce function does something that is not followed"


def install(patches: PatchSet) -> None:
    """Replace the functions of ``dgl.core``, through ``patches``."""
    import importlib

    core = importlib.import_module("dgl.core")
    for name, around, why in (
        ("message_passing", passing, "Runs `update_all` as operations over edges where a user's "
         "functions can be followed."),
        ("invoke_edge_udf", messages, "Counts calls of a user's message function, and makes its "
         "linear maps at the nodes where it can be followed and that is faster."),
        ("invoke_udf_reduce", mailboxes, "Counts calls of a user's reduce function, and runs it as "
         "operations over edges where it can be followed.")):
        native: Any = getattr(core, name, None)
        if own.is_function(native, "dgl", name):  # what a user put there may do anything
            patches.set(core, name, around(native), why)


class _Left(threading.local):
    """State of this thread. ``messages``, ``mailboxes``: the decision on a call whose messages the
    host's own code is to make, and reduce; ``message``: what they are made by (`_made_by`)."""

    messages: OpCall | Reason | None = None
    mailboxes: Reason | None = None
    message: Any = None


_left = _Left()


def _asked() -> Config | None:
    """The configuration of a call that may be taken over; None where the host's own code runs:
    within a compiled region, where it is off, and in layers that are the host's as a whole."""
    return None if torch.compiler.is_compiling() or layers.depth else current()


def passing(native: Callable) -> Callable:
    """``native``, which passes messages over a graph."""
    from dgl import core

    @kept_apart
    @functools.wraps(native)
    def message_passing(g: Any, mfunc: Any, rfunc: Any, afunc: Any) -> Any:
        if core.is_builtin(mfunc) and core.is_builtin(rfunc):
            return native(g, mfunc, rfunc, afunc)
        config = _asked()
        if config is None:
            return native(g, mfunc, rfunc, afunc)
        call = _passed(g, mfunc, rfunc, config)
        plan = None if type(call) is Reason else route.choose(call, True, config)
        if plan is None or plan.route == "native":
            # messages that do not gain with DGL's own reduction gain nothing without; a call that
            # waits for kernels is not decided again, as they may have come, which would reduce the
            # messages too
            decision = plan.rejected[0][1] if plan is not None and plan.code == PENDING else call
            if core.is_builtin(rfunc):
                _left.messages = decision
            else:
                _left.mailboxes, _left.message = _already(rfunc, call), _made_by(mfunc)
            try:
                return native(g, mfunc, rfunc, afunc)  # whose parts are counted
            finally:
                _left.messages = _left.mailboxes = _left.message = None
        name = _MESSAGES if core.is_builtin(rfunc) else _MAILBOXES
        out = route.run(name, call, functools.partial(native, g, mfunc, rfunc, None), config)
        return out if afunc is None else _applied(g, out, afunc)

    return message_passing


def _applied(g: Any, out: Any, function: Any) -> Any:
    """Results of a function of nodes, with the results ``out`` in their features."""
    from dgl import core
    from dgl.base import ALL, NID

    features = {**g.dstdata, **out}
    return core.invoke_node_udf(g, ALL, g.dsttypes[0], function, ndata=features,
                                orig_nid=features.get(NID))


def messages(native: Callable) -> Callable:
    """``native``, which makes messages by a function of the user's."""

    @kept_apart
    @functools.wraps(native)
    def invoke_edge_udf(graph: Any, eid: Any, etype: Any, func: Any, **more: Any) -> Any:
        config = _asked()
        if config is None:
            return native(graph, eid, etype, func, **more)
        decision, _left.messages = _left.messages, None
        return route.run(_MESSAGES, decision or _edges(graph, eid, func, config),
                         functools.partial(native, graph, eid, etype, func, **more), config)

    return invoke_edge_udf


def mailboxes(native: Callable) -> Callable:
    """``native``, which reduces messages by a function of the user's."""

    @kept_apart
    @functools.wraps(native)
    def invoke_udf_reduce(graph: Any, func: Any, msgdata: Any, **more: Any) -> Any:
        config = _asked()
        if config is None:
            return native(graph, func, msgdata, **more)
        decision, _left.mailboxes = _left.mailboxes, None
        return route.run(_MAILBOXES, decision or _nodes(graph, func, msgdata, config),
                         functools.partial(native, graph, func, msgdata, **more), config)

    return invoke_udf_reduce


# --- reading calls --------------------------------------------------------------------------------

@uncompiled
def _passed(g: Any, mfunc: Any, rfunc: Any, config: Config) -> OpCall | Reason:
    from dgl import core

    if not core.is_builtin(rfunc):
        call = _known(g, rfunc, config, _made_by(mfunc)) or _read(g, mfunc, rfunc, config)
        return _noted(g, rfunc, call, config) if type(call) is OpCall else call
    return _unread(g, mfunc, config) or _noted(g, mfunc, _read(g, mfunc, rfunc, config), config)


@uncompiled
def _edges(g: Any, eid: Any, function: Any, config: Config) -> OpCall | Reason:
    from dgl.base import is_all

    if not is_all(eid):
        return reason("GA211", "a function of some of the edges")
    return _unread(g, function, config) or _noted(
        g, function, _read(g, function, None, config), config)


@uncompiled
def _nodes(g: Any, function: Any, sent: Any, config: Config) -> OpCall | Reason:
    return _known(g, function, config, _left.message) or _noted(
        g, function, _read(g, None, function, config, sent), config, _left.message)


def _on_cpu(g: Any) -> bool:
    return g.device.type == "cpu" and not driver.placed()


def _unread(g: Any, function: Any, config: Config) -> Reason | None:
    """Why a message function that would gain nothing on a CPU is not looked at."""
    if config.when == "profitable" and _on_cpu(g) and g.num_edges() < _FEW:
        return reason("GA301")
    return _known(g, function, config)


def _known(g: Any, function: Any, config: Config, message: Any = None) -> Reason | None:
    """Why a function gained nothing on a CPU in a call before, with this ``message``."""
    if config.when != "profitable" or not _on_cpu(g):
        return None
    entry = _no_gain.get(_code(function))
    if entry is None or not entry[1] or entry[2] not in (None, message) or (
        checkpointed()):  # which may be about to repeat the call
        return None
    entry[1] -= 1
    return entry[0]


def _already(function: Any, call: OpCall | Reason) -> Reason | None:
    """``call`` where it is what was known of the function, so that it need not be asked again."""
    entry = _no_gain.get(_code(function))
    return call if entry is not None and entry[0] is call and type(call) is Reason else None


def _code(function: Any) -> Any:
    """The code of a function; None of one of another kind."""
    if type(function) is functools.partial:
        function = function.func
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    return getattr(function, "__code__", None)


def _made_by(function: Any) -> Any:
    """What tells a message function from others: its code, or the name of one of DGL's."""
    return _code(function) or getattr(function, "name", None)


def _noted(g: Any, function: Any, call: OpCall | Reason, config: Config,
           message: Any = None) -> OpCall | Reason:
    """``call``, noted if it can gain nothing on a CPU: its function is not looked at the next
    `_AGAIN` times, a reduce function that is not followed with this ``message``."""
    code = _code(function)
    if code is not None and config.when == "profitable" and _on_cpu(g):
        if type(call) is Reason and call.code in ("GA211", "GA301"):
            _no_gain.set(code, [call, _AGAIN, message])
        elif type(call) is OpCall and not call.gains:
            _no_gain.set(code, [reason("GA301"), _AGAIN, None])
    return call


def _read(g: Any, mfunc: Any, rfunc: Any, config: Config, sent: Any = None) -> OpCall | Reason:
    from gnnaccel.adapters.dgl.udf import memory, running

    edges = context_reason() or graphs.homogeneous(g)
    if type(edges) is Reason:
        return edges
    frames = _frames(g, mfunc, sent)
    result = memory.understood(memory.Pair(mfunc, rfunc), frames)
    if result is None:
        return reason("GA211", _NOT_FOLLOWED)
    computation, tensors = result
    graph = _graph_of(g, tensors, config)
    if type(graph) is Reason:
        return graph
    if rfunc is None:
        return running.of_edges(g, graph, computation, tensors, config.when == "supported")
    if computation.steps is not None and _initialises(frames["n"]):
        return reason("GA204", "nodes that no edge enters get what an initializer gives")
    return running.of_nodes(g, graph, computation, tensors, graphs.of_index(g._graph, 0))


def _frames(g: Any, mfunc: Any, sent: Any) -> dict[str, Any]:
    """Features by place, for `memory.understood`."""
    from dgl import core

    source, target = g._graph.metagraph.find_edge(0)
    src, dst = g._node_frames[source], g._node_frames[target]
    at = _unwritten(dst)
    if not core.is_builtin(mfunc):
        src, dst = at if src is dst else _unwritten(src), at
    return {"j": src, "i": dst, "n": at, "e": g._edge_frames[0], "m": sent or {},
            messages_.KINDS: {"etype": g.canonical_etypes[0]}}


def _unwritten(frame: Any) -> Any:
    """Features of nodes as the host gives them to users' functions: rows of another graph's that
    nobody read yet are taken for the call alone. Kept in the ``frame``, they would have no
    gradients after a call without, and would not see what is written to the other graph's."""
    waits = any(getattr(column, name, None) is not None for column in frame._columns.values()
                for name in ("index", "device", "deferred_dtype"))
    return frame.clone() if waits else frame


def _graph_of(g: Any, given: dict[str, Any], config: Config) -> OpGraph | Reason:
    """The edges, if the tensors of a call go with them."""
    tensors = list(given.values())
    if not tensors:
        return reason("GA206", "no features are read")
    if len({(t.device, t.dtype) for t in tensors}) > 1 or tensors[0].device != g.device:
        return reason("GA206", "features are of several devices or dtypes")
    if config.when == "profitable" and tensors[0].is_cpu and tensors[0].dtype == torch.float16:
        return reason("GA203", "DGL's own operations, which run on a CPU, have no float16 there")
    why = inference_reason(tensors) or subclass_reason(tensors)
    if why is not None:
        return why
    if any(t.is_neg() for t in tensors):
        return reason("GA206", "features are yet to be negated")
    if torch.is_autocast_enabled(tensors[0].device.type):
        return reason("GA203", "autocast is on", "call it outside of autocast")
    if not g.num_edges():
        return reason("GA303")
    if config.when == "profitable" and _on_cpu(g) and graphs.without_ids(g):
        return reason("GA204", "DGL's own operations, which run on a CPU, need ids of edges, which "
                               "the graph's CSC or CSR leaves out")
    if any(t.shape[0] != g.num_edges() for key, t in given.items() if key[:2] == "m."):
        return reason("GA206", "messages are not one for each edge")
    return calls.single(g._graph, tensors[0].device)


def _initialises(frame: Any) -> bool:
    """Whether new features of nodes begin with other numbers than 0."""
    from dgl.init import zero_initializer

    return any(one not in (None, zero_initializer)
               for one in (frame._default_initializer, *frame._initializers.values()))
