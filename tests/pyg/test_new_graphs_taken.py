"""What was read of a call by kernels holds for calls alike over new graphs, of other sizes; what
changed in between is read anew."""
from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch_geometric.nn import (FiLMConv, GCNConv, GENConv, GINConv, GINEConv, GraphConv,
                                MessagePassing, PNAConv, SAGEConv, SimpleConv, aggr)
from torch_geometric.utils import scatter

import gnnaccel
from gnnaccel.adapters.pyg.propagate import calls, reading
from gnnaccel.adapters.pyg.propagate.described import described, understood, width
from gnnaccel.adapters.tracing import tracing
from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.memory.layer_memory import memories
from gnnaccel.dispatch.ops import aggregation_cost, aggregation_route
from gnnaccel.dispatch.ops.aggregation_cost import Estimate
from tests.judge import close
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F


class Own(MessagePassing):
    """A user's layer, for whose message kernels are written."""

    def __init__(self, aggr: str = "add") -> None:
        super().__init__(aggr=aggr)
        self.lin, self.edge = torch.nn.Linear(F, F), torch.nn.Linear(EDGE, F)
        self.scale, self.rate, self.alpha = 0.5, 0.0, torch.nn.Parameter(torch.rand(F))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), e=self.edge(edge_attr))

    def message(self, x_i, x_j, e):
        return self.scale * torch.sigmoid(x_i * e + self.alpha) * x_j


class Weighted(MessagePassing):
    """A user's layer with a weight for each edge."""

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w, size=None)

    def message(self, x_j, w):
        return w.view(-1, 1) * x_j


class Quotient(Own):
    """A user's layer that divides one sum of messages by another, in its own ``aggregate``."""

    def aggregate(self, inputs, index, dim_size):
        above, below = [scatter(one, index, 0, dim_size) for one in (inputs, inputs.abs())]
        return self.alpha * above / (below + self.scale)


class Averaged(Weighted):
    """A user's layer whose own ``aggregate`` averages messages and scales the result."""

    scale = 0.5

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size, reduce="mean") * self.scale


class Untold(Weighted):
    """A user's layer whose own ``aggregate`` says nothing of the number of nodes."""

    def aggregate(self, inputs, index):
        return scatter(inputs, index, 0)


class Statistics(MessagePassing):
    """A user's layer whose message keeps statistics, and the last scores on the layer."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.norm = torch.nn.BatchNorm1d(F)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        self.last = x_i * x_j
        return self.norm(x_j) * torch.sigmoid(self.last)


def relu() -> torch.nn.Module:
    return torch.nn.Linear(F, F)


#: layer -> how it is made, and the width of features of its edges: 0 for none, None for a number
LAYERS = {
    "SAGEConv": (lambda: SAGEConv(F, 6), 0), "SAGEConv max": (lambda: SAGEConv(F, 6, "max"), 0),
    "GraphConv": (lambda: GraphConv(F, 6), 0),
    "GraphConv weighted": (lambda: GraphConv(F, 6, "mean"), None),
    "GINConv": (lambda: GINConv(relu()), 0), "GCNConv": (lambda: GCNConv(F, 6), 0),
    "GINEConv": (lambda: GINEConv(relu(), edge_dim=EDGE), EDGE),
    "GENConv": (lambda: GENConv(F, 6), 0),
    "GENConv learnt": (lambda: GENConv(F, 6, learn_t=True), 0),
    "GENConv edges": (lambda: GENConv(F, 6, edge_dim=EDGE), EDGE),
    "GENConv power": (lambda: GENConv(F, 6, aggr="powermean", learn_p=True), 0),
    "FiLMConv": (lambda: FiLMConv(F, 6), 0), "SimpleConv": (lambda: SimpleConv(), None),
    "Own": (Own, EDGE), "Own max": (lambda: Own("max"), EDGE), "Weighted": (Weighted, None),
    "Quotient": (Quotient, EDGE), "Averaged": (Averaged, None),
}


def inputs(width: int | None, nodes: int = 0, edges: int = 0) -> tuple:
    """Of a call over a new graph with a hub, copies of edges, and a node without any."""
    nodes, edges = nodes or random.randint(12, 40), edges or random.randint(40, 150)
    x, edge_index = graphs.features(nodes), graphs.square(nodes, edges)
    return x, edge_index, *(() if width == 0 else (graphs.edge_features(edges, width),))


def step(layer, args) -> list:
    """The result, and the gradients of all features and weights."""
    args = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in args]
    out = layer(*args)
    wanted = [t for t in (*args, *layer.parameters()) if t.requires_grad]
    found = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return [out, *found]


def right(layer, args) -> bool:
    """Whether a call gives what the host's own code does in double precision, or where that loses
    digits in single precision, as much. Over ids of 32 bits the host's gradients are wrong."""
    wide = [t if t.is_floating_point() else t.long() for t in args]
    with gnnaccel.disabled():
        exact = step(layer.double(), [t.double() if t.is_floating_point() else t for t in wide])
        host = step(layer.float(), wide)
    found = step(layer, args)
    return all((a is None) is (b is None) and (a is None or close(a, b.float(), 2e-4 if a.numel() > 1 else 5e-3)
                                               or close(a, c, 2e-4) or (a.isnan() & c.isnan()).any())
               for a, b, c in zip(found, exact, host))


@pytest.fixture
def reads(emulated, monkeypatch):
    """One entry for each call that was read."""
    seen, native = [], reading.read
    monkeypatch.setattr(reading, "read", lambda *args: (seen.append(1), native(*args))[1])
    with emulated.on(on_fallback="native"):
        yield seen


def taken(name: str) -> tuple:
    """A layer whose calls are taken over, and what its inputs are made of."""
    made, width = LAYERS[name]
    layer = made()
    for _ in range(3):
        assert right(layer, inputs(width))
    return layer, width


@pytest.mark.parametrize("name", LAYERS)
def test_calls_over_new_graphs_are_read_once(reads, name):
    made, width = LAYERS[name]
    layer = made()
    for _ in range(8):
        assert right(layer, inputs(width))
    assert len(reads) == 1
    assert {one for s in gnnaccel.stats().values() for one in s["routes"]} == {"cuda"}


@pytest.mark.parametrize("name", LAYERS)
def test_training_and_inference_take_turns(reads, name):
    made, width = LAYERS[name]
    layer = made()
    for _ in range(4):
        assert right(layer, inputs(width))
        with torch.no_grad():
            args = inputs(width)
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected, 1e-4)
    assert len(reads) == 2


# --- what changes between calls -------------------------------------------------------------------

def _hook(module, args, out):
    return 2 * out


def _doubled(x_j):
    return 2 * x_j


def _method(layer):
    layer.message = lambda **given: 3 * given["x_j"]


CHANGES = {
    "weights": lambda layer: [p.data.mul_(1.5) for p in layer.parameters()],
    "other weights": lambda layer: [layer._parameters.update(
        {name: torch.nn.Parameter(2 * p.detach())}) for layer in layer.modules()
        for name, p in [*layer._parameters.items()] if p is not None],
    "frozen": lambda layer: [p.requires_grad_(False) for p in layer.parameters()],
    "aggregation": lambda layer: setattr(layer, "aggr_module", aggr.MinAggregation()),
    "aggregation's hook": lambda layer: layer.aggr_module.register_forward_hook(_hook2),
    "aggregation's method": lambda layer: setattr(layer.aggr_module, "reduce",
                                                  lambda x, *args, **more: x.sum(0, keepdim=True)),
    "message hook": lambda layer: layer.register_message_forward_hook(_hook),
    "propagate hook": lambda layer: layer.register_propagate_forward_hook(_hook),
    "aggregate hook": lambda layer: layer.register_aggregate_forward_hook(_hook),
    "message": _method,
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "evaluation": lambda layer: layer.eval(),
    "number": lambda layer: [setattr(layer.aggr_module, name, value)
                             for name, value in (("t", 3.0), ("p", 2.0))
                             if type(getattr(layer.aggr_module, name, None)) is float],
    "eps": lambda layer: type(layer) is GENConv and setattr(layer, "eps", 0.25),
    "what a message reads": lambda layer: setattr(layer, "scale", 4.0),
    "map of edges": lambda layer: [setattr(layer, name, torch.nn.Linear(EDGE, len(m.weight)))
                                   for name, m in layer.named_children()
                                   if name in ("lin", "lin_edge", "edge")
                                   and m.weight.shape[1] == EDGE],
}


def _hook2(module, args, out):
    return out + 1


@pytest.mark.parametrize("times", [1, 3])  # the first two calls are decided
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_changes_is_seen(reads, name, change, times):
    made, width = LAYERS[name]
    layer = made()
    for _ in range(times):
        assert right(layer, inputs(width))
    CHANGES[change](layer)
    for _ in range(3):
        assert right(layer, inputs(width))


@pytest.mark.parametrize("name", ["Own", "Weighted"])
def test_a_class_whose_message_is_replaced(reads, name, monkeypatch):
    layer, width = taken(name)
    with monkeypatch.context() as patch:
        given = ("x_i", "x_j", "e") if name == "Own" else ("x_j", "w")
        other = (lambda self, x_i, x_j, e: x_j - 2 * x_i) if name == "Own" else (
            lambda self, x_j, w: x_j - w.view(-1, 1))
        assert other.__code__.co_varnames[1:] == given
        patch.setattr(type(layer), "message", other)
        for _ in range(2):
            assert right(layer, inputs(width))
    assert right(layer, inputs(width))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_of_any_kind(reads, name):
    """Few edges and many, one node, ids of 32 bits, features that want no gradient, views."""
    layer, width = taken(name)
    for nodes, edges in ((12, 1200), (300, 40), (3000, 9000), (13, 41)):
        assert right(layer, inputs(width, nodes, edges))
    args = list(inputs(width))
    assert right(layer, [args[0], args[1].int(), *args[2:]])
    assert right(layer, [args[0], args[1].flip(1).flip(1)[:, ::1], *args[2:]])
    assert right(layer, [torch.randn(2 * args[0].shape[0], F)[::2], *args[1:]])
    for empty in (args[1][:, :0],):  # no edges at all
        assert right(layer, [args[0], empty, *(t[:0] for t in args[2:])])
    assert right(layer, inputs(width))


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv", "SAGEConv max"])
def test_two_kinds_of_nodes(reads, name):
    """Pairs of features, of as many nodes at the ends as the call says."""
    layer = LAYERS[name][0]()
    for nodes, others in ((30, 20), (20, 30), (25, 25), (14, 40)):
        edge_index = graphs.bipartite(nodes, others)
        pair = torch.randn(nodes, F), torch.randn(others, F)
        for size in (None, (nodes, others)):
            with gnnaccel.disabled():
                expected = layer(pair, edge_index, size=size)
            assert close(layer(pair, edge_index.clone(), size=size), expected, 1e-4)
    assert right(layer, inputs(0))


@pytest.mark.parametrize("name", LAYERS)
def test_where_the_call_happens(reads, name):
    """Another dtype, autocast, other settings, hooks on all modules, a checkpoint."""
    layer, width = taken(name)
    args = inputs(width)
    every = torch.nn.modules.module.register_module_forward_hook
    places = [torch.autocast("cpu", torch.bfloat16), gnnaccel.enabled(exclude=[type(layer)]),
              gnnaccel.enabled(backend="torch"), hooked(every)]
    for number, place in enumerate(places):
        before = cuda_calls(layer)
        with place:
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected, 1e-4 if expected.dtype is torch.float32 else 0.05)
        assert number == 0 or cuda_calls(layer) == before
    saved = torch.utils.checkpoint.checkpoint(
        layer, args[0].requires_grad_(), *args[1:], use_reentrant=False)
    found = torch.autograd.grad(saved.square().sum(), args[0])[0]
    with gnnaccel.disabled():
        expected = torch.autograd.grad(layer(*args).square().sum(), args[0])[0]
    assert close(found, expected, 1e-4)


@contextlib.contextmanager
def hooked(register):
    handle = register(lambda module, args, out: None)
    try:
        yield
    finally:
        handle.remove()


def test_what_a_message_does_besides_is_done_in_each_call(reads):
    """Its statistics are kept once for each call, and what it sets on the layer is of that call."""
    layer, theirs = Statistics(), Statistics()
    for times in range(1, 8):
        layer.train(times != 5)
        theirs.train(times != 5)
        args = inputs(0)
        found = layer(*args)
        with gnnaccel.disabled():
            expected = theirs(*args)
        assert close(found, expected, 1e-4) and close(layer.last, theirs.last, 1e-5)
        for name, one in theirs.norm.named_buffers():
            assert close(getattr(layer.norm, name), one, 1e-4), name
    assert cuda_calls(layer) == 7 and len(reads) < 7


def cuda_calls(layer) -> int:
    return gnnaccel.stats()[type(layer).__name__]["routes"]["cuda"]


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_rows_that_nobody_says_the_number_of(reads, flow):
    """Results end with the last node that an edge enters, over each graph anew."""
    layer, place = Untold(flow=flow), int(flow == "source_to_target")
    for times in range(8):
        x, edge_index, w = inputs(None, nodes=20)
        edge_index[place].clamp_(max=18)
        edge_index[place, 3] = 18 + (times % 3 < 2)
        for _ in range(2):
            assert right(layer, (x, edge_index, w))
    assert gnnaccel.stats()["Untold"]["routes"] == {"cuda": 12, "native": 4}


def test_rows_that_are_counted_again_where_edges_changed(reads):
    layer, (x, edge_index, w) = Untold(), inputs(None, nodes=20)
    for last in (19, 19, 19, 15, 15, 19):
        edge_index[1].clamp_(max=15)
        edge_index[1, 3] = last
        assert right(layer, (x, edge_index, w))
        assert right(layer, (x, edge_index, w))
        with gnnaccel.disabled():
            expected = layer(x, edge_index, w)
        assert layer(x, edge_index, w).shape == expected.shape == (last + 1, F)


def test_a_call_of_an_own_aggregate_that_repeats_is_not_read_again(reads):
    for name in ("Quotient", "Averaged"):
        made, width = LAYERS[name]
        layer, args, before = made(), inputs(width), len(reads)
        for _ in range(4):
            assert right(layer, args)
        assert len(reads) == before + 1, name


def test_arguments_of_another_kind(reads):
    """Without weights and with some, with features of edges and without, of other dimensions."""
    graph, own = GraphConv(F, 6), Weighted()
    for _ in range(2):
        for count in range(3):
            x, edge_index, w = inputs(None)
            assert right(graph, (x, edge_index, w) if count else (x, edge_index))
            assert right(own, (x[:, :3 + count], edge_index, w))
            assert right(own, (x[:, :1], edge_index, w))
    gen, plain = GENConv(F, 6, edge_dim=F), GENConv(F, F)
    for _ in range(2):
        x, edge_index, attr = inputs(F)
        assert right(gen, (x, edge_index, attr))
        assert right(plain, (x, edge_index, attr)) and right(plain, (x, edge_index.clone()))


def test_what_is_not_kept(reads):
    """Of several reductions, and of layers that aggregate in their own way."""
    layers = [PNAConv(F, 6, ["mean", "max"], ["identity"], torch.ones(4).long()),
              SAGEConv(F, 6, ["mean", "max"])]
    for layer in layers:
        for _ in range(3):
            assert right(layer, inputs(0))
        memory = memories.get(layer)
        assert memory is None or memory.taken_once == [None, None]


def alike(one: dict, other: dict) -> bool:
    """Whether a call over one graph is read as one over another was."""
    (kinds, a, values), (others, b, other_values) = described(one), described(other)
    return kinds == others and values == other_values and [*map(width, a)] == [*map(width, b)]


def test_arguments_of_other_kinds_are_not_alike():
    """Numbers of rows do not count, but among the same edges they do."""
    x = torch.randn(4, 3)
    one, more = dict(x=x, n=2), dict(x=torch.randn(9, 3), n=2)
    assert alike(one, more) and described(one) != described(more)
    assert described(one) == described(dict(x=torch.randn(4, 3), n=2))
    for other in (dict(x=x, n=True), dict(x=x, n=2.5), dict(x=x), dict(x=(x, x), n=2),
                  dict(x=[x], n=2), dict(x=x.double(), n=2), dict(x=x[:, :2], n=2), dict(n=2, x=x),
                  dict(x=x.clone().requires_grad_(), n=2), dict(x=x, n="2"), dict(x=x, n=None)):
        assert not alike(one, other) and described(one) != described(other)
    a, b = x, x.clone()
    assert not alike(dict(x=(a, a)), dict(x=(a, b)))
    assert described(dict(x=[a, b])) == described(dict(x=[b, a]))
    assert not alike(dict(x=x[0, 0]), dict(x=x[0]))
    assert alike(dict(size=(3, 4)), dict(size=(5, 6))) and alike(dict(size=(3, 4)),
                                                                  dict(size=(3, 3)))
    assert not alike(dict(size=(3, 4)), dict(size=(3, None)))
    assert described(dict(size=(3, 4))) != described(dict(size=(5, 6)))


def test_arguments_that_nobody_describes_are_like_no_others():
    thing = dict(x=object())
    one = described(thing)
    assert not understood(one) and understood(described(dict(x=None, n=2)))
    assert one != described(thing) and not alike(thing, thing)
    assert one[0] != described(dict(x=None))[0]



# --- decisions ------------------------------------------------------------------------------------

@pytest.fixture
def decisions(emulated, monkeypatch):
    """One entry for each decision about an aggregation, whose structure costs ten calls' gain."""
    seen, decide = [], aggregation_route.decide
    monkeypatch.setattr(aggregation_route, "decide",
                        lambda *args: (seen.append(1), decide(*args))[1])
    monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: Estimate(1.0, 10.0, 1.0, 2.0))
    monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
    with emulated.on(when="profitable", on_fallback="native"):
        yield seen


def built(edges: int) -> tuple:
    """Arguments over a graph that has a structure, as an earlier layer's call leaves it."""
    args = graphs.features(), graphs.square(edges=edges)
    cache.lookup(args[1], graphs.N, graphs.N)
    return args


@torch.no_grad()
@pytest.mark.parametrize("made", [lambda: FiLMConv(F, 6), lambda: GINConv(relu())])
def test_a_decision_holds_for_graphs_of_about_as_many_edges(decisions, made):
    layer = made()
    for _ in range(5):
        layer(*built(60))
    decisions.clear()
    for edges, decided in ((60, 0), (100, 0), (30, 0), (121, 1), (240, 0), (100, 0), (59, 1)):
        args = built(edges)
        with gnnaccel.disabled():
            expected = layer(*args)
        assert close(layer(*args), expected, 1e-4)
        assert len(decisions) == decided, edges
        decisions.clear()


@torch.no_grad()
@pytest.mark.parametrize("once", [False, True])
def test_one_edge_and_none(emulated, monkeypatch, once):
    """A graph without edges is never a graph of about as many."""
    if once:
        estimate = Estimate(gain=9.0, structure=1e9, ours=1.0, native=10.0, once=2.0)
        monkeypatch.setattr(aggregation_cost, "estimate", lambda *args: estimate)
        monkeypatch.setattr(calls, "_FEW_AT_FIRST", 0)
    layer, x = GINConv(relu()), graphs.features()
    with emulated.on(on_fallback="native", when="profitable" if once else "supported"):
        for edges in (1, 1, 1, 0, 1):
            edge_index = torch.randint(0, graphs.N, (2, edges))
            with gnnaccel.disabled():
                expected = layer(x, edge_index)
            assert close(layer(x, edge_index), expected, 1e-5)
    assert gnnaccel.stats()["GINConv"]["reasons"] == {"GA303": 1}


@torch.no_grad()
@pytest.mark.parametrize("made", [lambda: FiLMConv(F, 6), lambda: GINConv(relu())])
def test_a_decision_over_a_structure_is_none_to_build_one(decisions, made):
    layer = made()
    for _ in range(6):
        layer(*built(60))
    before = gnnaccel.stats()[type(layer).__name__]["routes"]
    layer(graphs.features(), graphs.square(edges=60))
    after = gnnaccel.stats()[type(layer).__name__]["routes"]
    assert after["cuda"] == before["cuda"] == 6 and after["native"] == 1


def test_a_message_is_read_once_in_each_mode(emulated, monkeypatch):
    seen, trace = [], tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *args: (seen.append(1), trace(*args))[1])
    layer = FiLMConv(F, 6)
    with emulated.on():
        for times in range(6):
            layer.train()(*inputs(0))
            with torch.no_grad():
                layer.eval()(*inputs(0))
            if not times:
                seen.clear()
    assert not seen
