"""The memory of each layer's calls, and the short way of calls that are like one of them.

A `LayerMemory`, which each call asks (`fast_path`), holds the last call by a faster route that was
kept (`Exact`), for calls over the same edges, and native calls (`native_cache`).
"""
from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture, driver
from gnnaccel.dispatch.graph import ledger as ledgers
from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays
from gnnaccel.dispatch.graph.ledger import GraphLedger
from gnnaccel.dispatch.graph.tensor_ref import TensorRef, unversioned
from gnnaccel.dispatch.memory.native_cache import (GRAPHS, MISSED, STREAK, WATCHED, InnerCalls,
                                                   NativeExact, NativeSized, NativeStreak, autocast,
                                                   plain_tensors)
from gnnaccel.dispatch.observe import counters, records
from gnnaccel.dispatch.plan.compiling import PENDING
from gnnaccel.dispatch.plan.request import EXPECTED
from gnnaccel.dispatch.policy import config as configs
from gnnaccel.dispatch.policy.config import Config
from gnnaccel.dispatch.policy.names import IdentityMap
from gnnaccel.dispatch.policy.reasons import Reason
from gnnaccel.dispatch.quantized import settings
from gnnaccel.dispatch.run.autograd import checkpointed
from gnnaccel.dispatch.uncompiled import uncompiled

#: result of an adapter's ``keep`` for calls that cannot be repeated
UNREPEATABLE = object()
_HOSTS = ("torch.", "torch_geometric.", "dgl.")
_GRAPHS = 4  # graphs over which calls are kept, in each mode
_MADE = 256  # memories made until ledgers of graphs forget layers that are gone
# Calls in a row like no kept one, after which one in seven is kept: an odd number, so that where
# each graph comes twice it is not always the second call.
_UNREPEATED, _EACH = 4, 7
_numbers = itertools.count()
_entries, _maps = settings.kept()
_watching, _drivers = counters.watching, driver.in_place
_tracing, _grad = torch._C._get_tracing_state, torch.is_grad_enabled


class Exact:
    """A call by a faster route, and its decision.

    ``key``: of the adapter, all that the decision depends on but the graph; ``structure``: the
    integer tensors among the arguments, the graph's and others; ``plain``: they are all arguments
    but the first, a plain tensor; ``ledger``: of its graph; ``graph``: the structure, held weakly,
    since the structure cache decides how long that lives; ``kept``: of the adapter, what else a
    repetition needs; ``bound``: the call bound to the layer's weights, if it can be; ``older``: the
    one that was kept before, over another graph.
    """

    __slots__ = ("epoch", "key", "structure", "plain", "ledger", "graph", "stated", "plan", "run",
                 "kept", "bound", "older")

    def __init__(self, epoch: int, key: tuple, structure: Sequence[Tensor], plain: bool,
                 ledger: GraphLedger, graph: Any, spec: Any, plan: Any, run: Any, kept: Any,
                 bound: Any):
        self.epoch, self.key, self.plain = epoch, key, plain
        self.ledger = ledger
        self.graph = weakref.ref(spec.held(graph))
        self.structure = tuple(map(TensorRef, structure))
        self.stated, self.plan, self.run = spec.kept(), plan, run
        self.kept, self.bound = kept, bound
        self.older: Exact | None = None

    def after(self, older: Exact | None) -> Exact:
        """This one, linked to earlier ones over other graphs that still live, `_GRAPHS` in all."""
        last, count, mine = self, 1, self.structure[-1]()
        while older is not None and count < _GRAPHS:
            edges = older.structure[-1]()
            if edges is not None and edges is not mine and older.epoch == self.epoch:
                last.older, last, count = older, older, count + 1
            older = older.older
        last.older = None
        return self

    def repeat(self, layer: Any, adapter: Any, args: tuple, kwargs: dict, held: Any) -> Any:
        """The result of a call like this one. ``held``: the structure that ``graph`` refers to."""
        spec, inputs = self.stated, adapter.again(layer, args, kwargs, self.kept)
        call = spec.call(held if spec.over is None else spec.over(held, inputs), self.plan)
        call.run = self.run
        return adapter.run(layer, spec, inputs, call)


def remember(layer: Any, adapter: Any, args: tuple, kwargs: dict, config: Config, spec: Any,
             inputs: Any, plan: Any, call: Any, run: Any, quantized: bool,
             like: Exact | None, memory: LayerMemory | None) -> Any:
    """Keep a call by a faster route, as an `Exact`, for calls that repeat it.

    Returns the call as `Exact.bound` has it, None where it cannot be bound. Nothing is kept where
    the layer's calls are hardly repeated (`LayerMemory.keeps`), where the adapter has no key for
    the call, where its graph is none of its arguments, or of a ``quantized`` call that is no plain
    one. ``like``: the kept call as which it was stated, whose bound call may serve.
    """
    keeps = memory is None or memory.keeps(spec.held(call.graph))
    binds = adapter.bind is not None and plan.route == "cuda" and not quantized
    if like is not None and not keeps:
        return like.bound if binds and like.bound is not None and like.bound.serves(call) else None
    if not (keeps or binds):
        return None
    indices = index_tensors(args, kwargs)
    if unversioned(indices) or not set(map(id, inputs.structure)).issubset(map(id, indices)):
        return None
    # only keys of such calls know the layer's weights themselves, to which a call may be bound
    plain = (not kwargs and len(indices) == len(args) - 1 and type(args[0]) is Tensor
             and all(map(is_, indices, args[1:])))
    bound = adapter.bind(layer, call) if plain and binds else None
    key = adapter.key(layer, args, kwargs) if keeps else None
    if key is None or (quantized and not plain):
        return bound
    extras = adapter.keep(layer, args, kwargs, spec, inputs)
    if extras is not UNREPEATABLE:
        exact, mode = (memory or of(layer)).exact, mode_of(layer)
        exact[mode] = Exact(config.epoch, key, indices, plain, ledgers.of(inputs.edge_index),
                            call.graph, spec, plan, run, extras, bound).after(exact[mode])
    return bound


def mode_of(layer: Any) -> int:
    """Mode of a call, 0 to 3: whether gradients are on, plus 2 where the layer is training."""
    return _grad() + 2 * (layer.training is True)


def index_tensors(args: tuple, kwargs: dict) -> list[Any]:
    """The integer tensors among the arguments, in their pairs and in their dictionaries, and the
    arrays of a host's own graphs."""
    indices: list[Any] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is dict or kind is tuple:
            indices += [t for t in (a.values() if kind is dict else a)
                        if isinstance(t, Tensor) and not t.is_floating_point()]
        elif isinstance(a, Tensor):
            if not a.is_floating_point():
                indices.append(a)
        elif kind in GRAPHS:
            indices += GRAPHS[kind].structure(a)
    return indices


class LayerMemory:
    """Memory of one layer's calls.

    In each `mode_of` the layer, as training and evaluation take turns: ``exact``, the last call by
    a faster route that was kept, and by it a few before; ``native_exact``, ``native_sized``, a
    native call; ``over``, message passing's last calls over some edges, by the id of these. With
    gradients off and on: ``native_once``, ``taken_once``, of calls over edges not seen before, the
    last that was native, and the last that ran by kernels; ``unread``, how many calls over such
    edges went native unread; ``in_turn``, by types of arguments, native calls in a row; ``going``,
    the last of these, None where calls by kernels are to be compared first.

    ``last``: the graph of the last call that was looked at, how many calls it had had by then, and
    whether none of the layer's was native; ``expected``: how many calls the last such graph before
    it served from the layer's on; ``unrepeated``: how many calls by a faster route in a row were
    like no kept one; ``graph``: the structure of the last of these, weakly; ``in_a_row``: native
    calls in a row that were like an earlier one, and what follows from many (``streak``);
    ``number``: the layer's key in ledgers of graphs; ``why``: the reason of the last call that was
    not understood; ``left``: of calls of a model, how many may yet show something; ``inner``: facts
    about the inner layers, kept by the adapter of a layer around others.
    """

    __slots__ = ("exact", "unrepeated", "graph", "native_exact", "native_sized", "number",
                 "in_a_row", "streak", "why", "left", "over", "native_once", "taken_once",
                 "unread", "in_turn", "going", "inner", "last", "expected")

    def __init__(self) -> None:
        self.over: list[dict[int, Any]] = [{}, {}, {}, {}]
        self.native_once: list[Any] = [None, None]
        self.in_turn: list[dict[tuple[type, ...], Any]] = [{}, {}]
        self.going: list[Any] = [None, None]
        self.taken_once: list[Any] = [None, None]
        self.unread, self.unrepeated = [0, 0], 0
        self.inner: Any = None
        self.exact: list[Exact | None] = [None] * 4
        self.graph: weakref.ref | None = None
        self.native_exact: list[NativeExact | None] = [None] * 4
        self.native_sized: list[NativeSized | None] = [None] * 4
        self.number, self.in_a_row, self.left = next(_numbers), 0, WATCHED
        self.streak: NativeStreak | None = None
        self.why: Reason | None = None
        self.last: tuple[GraphLedger, int, bool] | None = None
        self.expected: int | None = None

    def expects(self, edges: Any) -> tuple[bool, int]:
        """Whether the layer's last call was over these edges too; and how many calls are still to
        come over them, this one counted, if they serve as many (of any layer) as earlier edges did
        from the layer's call on: 0 if they have served more. Notes the call.

        Only edges over which all was counted show how many: most native calls are not. As long as
        there were no others, edges that come again are taken to come often.
        """
        now, last = ledgers.of(edges), self.last
        now.calls += 1
        if last is not None:
            if last[0] is now:
                return True, max(0, (self.expected or 0) - (now.calls - last[1]))
            if last[2]:
                served = last[0].calls - last[1] + 1
                self.expected = EXPECTED if served > EXPECTED else served
        self.last = now, now.calls, True
        return False, self.expected or EXPECTED

    def keeps(self, graph: Any) -> bool:
        """Whether to keep a call by a faster route over this graph that is like no kept one.

        Keeping a call costs as much as repeating it. After several such calls in a row, as with
        mini-batches, a call is kept only if its graph is that of the call before, and now and then.
        Within a checkpoint each is kept: the repetition has to save the same tensors.
        """
        before, self.graph = self.graph, weakref.ref(graph)
        self.unrepeated += 1
        return (self.unrepeated <= _UNREPEATED or not self.unrepeated % _EACH
                or (before is not None and before() is graph) or checkpointed())

    def of(self, structure: Sequence[Tensor]) -> list[Any] | None:
        """Entry in `GraphLedger.layers` of a native call over these tensors, unwritten since."""
        for t in structure:
            ref = ledgers.ledgers.get(id(t))
            entry = (ref.layers.get(self.number) if ref is not None and ref() is t
                     and ref.version == t._version else None)
            if entry is not None:
                return entry if set(map(id, structure)).issubset(entry[0]) else None
        return None

    def meets(self, graph: Sequence[Tensor], largest: Tensor, state: tuple | None = None,
              mode: int = 0) -> bool:
        """Whether the graph of these tensors, unwritten since, was in a native call, more often
        than graphs are expected to come in a step, and is not known to be native in this state
        however often it comes. Notes the graph. False for inference tensors, which have no version.
        ``state``, ``mode``: of a call that is about to be native, else None and 0."""
        if largest.is_inference():
            return False
        ids = tuple(map(id, graph))
        ledger, last = ledgers.of(largest), self.last
        entry, again = ledger.layers.get(self.number), last is not None and last[0] is ledger
        if entry is not None and entry[0] == ids:
            if (again and state is not None
                and ledger.calls - last[1] + 1 < (self.expected or 0)):  # type: ignore[index]
                ledger.calls += 1
                return False
            return entry[1 + mode] != state
        ledger.layers[self.number] = [ids, *[None] * 4]
        if not again:
            ledger.calls += 1
        self.last = ledger, last[1] if again else ledger.calls, False  # type: ignore[index]
        return False


memories: IdentityMap[LayerMemory] = IdentityMap()


def of(layer: Any) -> LayerMemory:
    """The memory of a layer, made by the first call."""
    if (memory := memories.get(layer)) is None:
        memories.set(layer, memory := LayerMemory())
        if not memory.number % _MADE:  # models may come and go over one graph
            ledgers.keep([one.number for one in memories.values()])
    return memory


def graph_of(structure: tuple, args: tuple, kwargs: dict) -> tuple:
    """The tensors by which the graph of a call is known.

    They are its ``structure``; where that holds arrays of a host's own graph, the tensors that
    stand for it (`native_cache.GRAPHS`), and those of types and the like among the arguments.
    """
    if not structure or type(structure[0]) is not EdgeArrays:
        return structure
    tensors = plain_tensors((*args, *kwargs.values()))
    return tuple(t for t in tensors if not t.is_floating_point()) if tensors else structure


# --- the short way -----------------------------------------------------------------------------

def all_unmoved(refs: Sequence[TensorRef], tensors: Sequence[Any]) -> bool:
    """`TensorRef.unmoved` of each, without a call for each. Where one sequence is longer, its rest
    counts for nothing. None, in the place of a tensor, is none that has died."""
    for ref, t in zip(refs, tensors):
        if t is None or ref() is not t or ref.version != t._version or ref.pointer != t.data_ptr():
            return False
    return True


@uncompiled
def fast_path(layer: Any, adapter: Any, native: Callable, args: tuple, kwargs: dict,
              config: Config) -> Any:
    """The result of a call that is like an earlier one, counted; `MISSED` for any other.

    ``adapter``: of the layer's class, None for models, whose calls are only native.
    ``native.host``, if there is one: the host's function, for where nothing in it is taken over.
    """
    entry = memories.entries.get(id(layer))
    if (entry is None or records.sinks  # the short ways tell nothing
        or capture.capturing()):  # decisions of earlier calls need not hold for replays
        return MISSED
    memory, grad = entry[1], _grad()  # an entry goes when its layer does
    mode = grad + 2 * (layer.training is True)  # `mode_of`, without its call
    exact = memory.exact[mode]
    given: Any = None
    while exact is not None and exact.epoch == config.epoch:
        if given is None and not exact.plain:
            given = index_tensors(args, kwargs)
        indices = args[1:] if exact.plain else given
        if (indices and exact.structure[-1]() is indices[-1]
            and all_unmoved(exact.structure, indices)):
            held = exact.graph()
            if held is not None and exact.key == adapter.key(layer, args, kwargs):
                held.touched, memory.unrepeated = True, 0
                exact.ledger.calls += 1
                counters.count(type(layer).__name__, exact.plan.route)
                bound = exact.bound
                if bound is not None and bound.valid():
                    return bound(args[0], held)
                out = exact.repeat(layer, adapter, args, kwargs, held)  # as `_decide` does
                as_is = grad or type(out) is not Tensor or not out._is_view()
                return out if as_is else out.detach()
        exact = exact.older
    if _tracing() is not None:  # a tracer would write the comparisons down
        return MISSED
    streak = memory.streak
    if streak is not None and streak.left and not kwargs and streak.goes_on(args, config, grad):
        like = streak.like
    else:
        found = memory.native_exact[mode] or memory.native_sized[mode]
        found = found and looked_at(memory, layer, args, kwargs, config, mode)
        if found is None:
            memory.in_a_row, memory.streak = 0, None
            return MISSED
        like = found
    inner, tally = like.inner, like.inner.tally
    if tally is None or _entries or _maps:
        return _watched(inner, native, layer, args, kwargs, like.code)
    tally.calls += 1
    if _watching:
        counters.note(tally.counts, inner.lasting)
    if not inner.silent:
        return native(layer, *args, **kwargs)
    native = getattr(native, "host", native)
    token = configs.silence()
    try:
        return native(layer, *args, **kwargs)
    finally:
        configs.end_silence(token)


def looked_at(memory: LayerMemory, layer: Any, args: tuple, kwargs: dict, config: Config,
              mode: int) -> NativeExact | NativeSized | None:
    """The earlier call that this one is like. ``mode``: as `mode_of` says."""
    state = config.epoch, layer.training, autocast(), len(_drivers)  # `native_cache.state_of`
    arguments = (*args, *kwargs.values()) if kwargs else args
    like: NativeExact | NativeSized | None = memory.native_exact[mode]
    if (like is None or like.state != state or not like.fits(arguments, kwargs)
        # a checkpoint repeats its calls, when the kernels may be there
        or ((like.code == PENDING or like.inner.waiting) and checkpointed())):
        like = memory.native_sized[mode]
        if like is None or like.state != state:
            return None
        graph = like.fits(arguments, kwargs)
        if graph is MISSED or checkpointed() or (
            graph and memory.meets(graph[0], graph[1], state, mode)):
            return None
    if like.edges_at is not None and not kwargs:
        memory.in_a_row += 1
        if memory.in_a_row >= STREAK and like.inner.tally is not None:
            memory.streak = NativeStreak(like, len(args), config.epoch)
    return like


def _watched(inner: InnerCalls, native: Callable, layer: Any, args: tuple, kwargs: dict,
             code: str | None) -> Any:
    """``native(layer, *args, **kwargs)``, watched where that may show something."""
    if not inner.left or _entries or _maps:
        counters.again(type(layer).__name__, code)
        settings.native_again(layer)
        return native(layer, *args, **kwargs)
    with counters.watched() as inside:
        counters.again(type(layer).__name__, code)
        out = native(layer, *args, **kwargs)
    inner.left -= inside is not None
    if (inside is not None and inside.native and not (inside.decided and inner.lasting)
        and of_the_host(layer)):
        inner.tally, inner.left = counters.tally(inside.counts), 0
        inner.waiting = any(code == PENDING for _, _, code in inside.counts)
        inner.silent = sum(inside.counts.values()) > 1
    return out


def of_the_host(layer: Any) -> bool:
    """Whether nothing of the user's own runs inside the layer."""
    return all(type(module).__module__.startswith(_HOSTS) and not module._forward_pre_hooks
               and not module._forward_hooks for module in layer.modules())
