"""Calls of layers with adapters that differ from a kept one in their graph and in numbers of rows
are stated as that was; all else is seen."""
from __future__ import annotations

import random

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, NNConv, PNAConv, TransformerConv

import gnnaccel
from gnnaccel.adapters import pyg
from gnnaccel.dispatch.run import attention_bound
from tests.judge import close, spread
from tests.pyg import graphs
from tests.pyg.graphs import EDGE, F

DEGREES = torch.tensor([1, 4, 9, 5, 2])
#: layer -> how it is made, and the width of features of its edges, 0 for none
LAYERS = {
    "GATConv": (lambda: GATConv(F, 4, 2), 0),
    "GATConv edges": (lambda: GATConv(F, 4, 2, edge_dim=EDGE), EDGE),
    "GATv2Conv": (lambda: GATv2Conv(F, 4, 2, edge_dim=EDGE), EDGE),
    "TransformerConv": (lambda: TransformerConv(F, 4, 2), 0),
    "TransformerConv edges": (lambda: TransformerConv(F, 4, 2, edge_dim=EDGE), EDGE),
    "PNAConv": (lambda: PNAConv(F, 6, ["mean", "max", "std"], ["identity", "linear"], DEGREES,
                                edge_dim=EDGE, towers=2), EDGE),
    "NNConv": (lambda: NNConv(F, 6, torch.nn.Sequential(torch.nn.Linear(EDGE, F * 6))), EDGE),
}


def inputs(width: int, nodes: int = 0, edges: int = 0) -> tuple:
    nodes, edges = nodes or random.randint(12, 40), edges or random.randint(40, 150)
    x, edge_index = graphs.features(nodes), graphs.square(nodes, edges)
    return x, edge_index, *((graphs.edge_features(edges, width),) if width else ())


def step(layer, args, grad: bool = True) -> list:
    """The result, and the gradients of all features and weights."""
    args = [t.detach().clone().requires_grad_(grad) if t.is_floating_point() else t for t in args]
    out = layer(*args)
    wanted = [t for t in (*args, *layer.parameters()) if t.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]


def right(layer, args, grad: bool = True) -> bool:
    """Whether a call gives what the host's own code does in double precision. Gradients that are
    nothing but rounding are measured against the largest."""
    dtype = next(layer.parameters()).dtype
    with gnnaccel.disabled():
        host = step(layer, args, grad)
        exact = step(layer.double(), [t.double() if t.is_floating_point() else t for t in args],
                     grad)
    found = [t if t is None else t.detach() for t in step(layer.to(dtype), args, grad)]
    least = 1e-3 * max(float(b.abs().max()) for b in exact[1:] if b is not None and b.numel())
    return all((a is None) is (b is None) and (a is None or close(a, b.to(a.dtype), 5e-4)
                                               or close(a, c, 5e-4)
                                               or float((a - b).abs().max()) < 5e-4 * least)
               for a, b, c in zip(found, exact, host))


@pytest.fixture
def stated(emulated, monkeypatch):
    """One entry for each call that was stated from the start."""
    seen, native = [], pyg._Guarded.state
    monkeypatch.setattr(pyg._Guarded, "state", lambda *args: (seen.append(1), native(*args))[1])
    with emulated.on(on_fallback="native"):
        yield seen


def made(name: str):
    make, width = LAYERS[name]
    layer = spread(make())
    for _ in range(6):  # so that not every call is kept
        layer(*inputs(width))
    assert right(layer, inputs(width))
    return layer, width


@pytest.mark.parametrize("name", LAYERS)
def test_calls_over_new_graphs_are_stated_once(stated, name):
    layer, width = made(name)
    for _ in range(6):
        assert right(layer, inputs(width))
    assert len(stated) == 1
    with torch.no_grad():  # one call in seven is kept
        for _ in range(14):
            args = inputs(width)
            with gnnaccel.disabled():
                expected = layer(*args)
            assert close(layer(*args), expected, 1e-4)
    assert 1 < len(stated) <= 8
    assert {one for s in gnnaccel.stats().values() for one in s["routes"]} == {"cuda"}


CHANGES = {
    "weights": lambda layer: [p.data.mul_(1.5) for p in layer.parameters()],
    "moved weights": lambda layer: [setattr(p, "data", 2 * p.data) for p in layer.parameters()],
    "other weights": lambda layer: [m._parameters.update({name: torch.nn.Parameter(2 * p.detach())})
                                    for m in layer.modules()
                                    for name, p in [*m._parameters.items()] if p is not None],
    "frozen": lambda layer: [p.requires_grad_(False) for p in layer.parameters()],
    "some frozen": lambda layer: [p.requires_grad_(False) for p in [*layer.parameters()][::2]],
    "double": lambda layer: layer.double(),
    "hook of a map": lambda layer: [m.register_forward_hook(lambda m, a, out: 2 * out)
                                    for m in layer.modules() if type(m).__name__ == "Linear"],
    "message hook": lambda layer: layer.register_message_forward_hook(lambda m, a, out: 2 * out),
    "propagate hook": lambda layer: layer.register_propagate_forward_hook(
        lambda m, a, out: 2 * out),
    "aggregation's hook": lambda layer: layer.aggr_module.register_forward_hook(
        lambda m, a, out: out + 1),
    "another map": lambda layer: [setattr(m, name, Doubling(inner))
                                  for m in [*layer.modules()]
                                  for name, inner in [*m._modules.items()]
                                  if type(inner).__name__ == "Linear"],
    "no bias": lambda layer: setattr(layer, "bias", None) if "bias" in layer._parameters else None,
    "heads averaged": lambda layer: averaged(layer),
    "slope": lambda layer: setattr(layer, "negative_slope", 0.7),
    "no loops": lambda layer: setattr(layer, "add_self_loops", False),
    "evaluation": lambda layer: layer.eval(),
    "flow": lambda layer: setattr(layer, "flow", "target_to_source"),
    "method": lambda layer: setattr(layer, "message", Refusing()),
}


class Doubling(torch.nn.Module):
    """A map and twice its result."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x):
        return 2 * self.inner(x)


class Refusing:
    """Stands for a message that fails."""

    def __call__(self, *args, **kwargs):
        raise RuntimeError("the user's own message")


def averaged(layer) -> None:
    """Heads averaged, where the layer has some, and maps of the same sizes."""
    if type(layer) in (GATConv, GATv2Conv):
        layer.concat, layer.bias = False, torch.nn.Parameter(torch.randn(4))
    elif type(layer) is TransformerConv:
        layer.concat, layer.lin_skip = False, torch.nn.Linear(F, 4)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_changes_is_seen(stated, name, change):
    layer, width = made(name)
    CHANGES[change](layer)
    for _ in range(2):
        args = inputs(width)
        if change == "method":
            for place in gnnaccel.disabled(), gnnaccel.enabled(when="supported", backend="cuda"):
                with place, pytest.raises(RuntimeError, match="the user's own"):
                    layer(*args)
        elif change == "double":
            assert right(layer, [t.double() if t.is_floating_point() else t for t in args])
        else:
            assert right(layer, args)


def test_dropout_of_weights_in_training(stated):
    """Set between two calls over new graphs: some of the weights are left out from then on."""
    for layer in GATConv(F, 4, 2, bias=False), TransformerConv(F, 4, 2, root_weight=False):
        for _ in range(3):
            layer(*inputs(0))
        args, first = inputs(0), None
        layer.dropout = 0.9
        for _ in range(3):
            out = layer(*args)
            assert first is None or not torch.equal(out, first)
            first = out
            args = args[0], args[1].clone()
        assert (first == 0).any()
        layer.eval()
        assert right(layer, inputs(0))


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_of_any_kind(stated, name):
    layer, width = made(name)
    for nodes, edges in ((12, 1200), (300, 40), (3000, 9000), (13, 41)):
        assert right(layer, inputs(width, nodes, edges))
    args = list(inputs(width))
    assert right(layer, [args[0], args[1].flip(1).flip(1)[:, ::1], *args[2:]])
    assert right(layer, [torch.randn(2 * args[0].shape[0], F)[::2], *args[1:]])
    assert right(layer, [args[0], args[1][:, :0], *(t[:0] for t in args[2:])])  # no edges
    assert right(layer, inputs(width), grad=False)
    with gnnaccel.disabled():
        expected = layer(*args)
    assert close(layer(args[0], args[1].int(), *args[2:]), expected, 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        with gnnaccel.disabled():
            expected = layer(*args)
        assert close(layer(*args), expected, 0.05)
    assert right(layer, inputs(width))


@pytest.mark.parametrize("name", [name for name, (_, width) in LAYERS.items() if not width])
def test_edges_of_another_kind(stated, name):
    """A sparse matrix, and an EdgeIndex, after lists of edges; and lists of edges again."""
    layer, _ = made(name)
    x, edge_index = inputs(0, 20)
    edge_index = torch.unique(edge_index, dim=1).contiguous()  # as entries of a matrix
    ones = torch.ones(edge_index.shape[1])
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (20, 20)).coalesce().to_sparse_csr()
    for edges in matrix, EdgeIndex(edge_index, sparse_size=(20, 20)), edge_index:
        with gnnaccel.disabled():
            expected = layer(x, edges)
        assert close(layer(x, edges), expected, 1e-4)
    assert right(layer, inputs(0))


@pytest.mark.parametrize("name", [name for name, (_, width) in LAYERS.items() if width])
def test_features_of_too_few_edges(stated, name):
    """An error of the host's stays one, whatever came before."""
    layer, width = made(name)
    x, edge_index, edge_attr = inputs(width)
    for place in gnnaccel.disabled(), gnnaccel.enabled(when="supported", backend="cuda"):
        with place, pytest.raises((RuntimeError, IndexError, ValueError)):
            layer(x, edge_index, edge_attr[:-1])
    assert right(layer, inputs(width))


class OfPairs(torch.nn.Module):
    """A layer, of two tensors of features."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, y, edge_index, *more):
        return self.layer((x, y), edge_index, *more)


#: layer -> how it is made, and the width of features of its edges, 0 for none
OF_PAIRS = {
    "GATConv": (lambda: GATConv((F, F), 4, 2, add_self_loops=False), 0),
    "GATConv loops": (lambda: GATConv((F, F), 4, 2), 0),
    "GATConv one map": (lambda: GATConv(F, 4, 2, add_self_loops=False, residual=True), 0),
    "GATConv edges": (lambda: GATConv((F, F), 4, 2, edge_dim=EDGE, add_self_loops=False), EDGE),
    "GATv2Conv": (lambda: GATv2Conv(F, 4, 2, add_self_loops=False), 0),
    "GATv2Conv one map": (lambda: GATv2Conv(F, 4, 2, share_weights=True), 0),
    "TransformerConv": (lambda: TransformerConv(F, 4, 2), 0),
    "TransformerConv edges": (lambda: TransformerConv(F, 4, 2, edge_dim=EDGE), EDGE),
}
SIZES = (30, 20), (20, 30), (25, 25), (14, 40), (31, 19), (12, 12)


def pairs(width: int, nodes: int, others: int) -> tuple:
    edge_index = graphs.bipartite(nodes, others)
    return (torch.randn(nodes, F), torch.randn(others, F), edge_index,
            *((graphs.edge_features(edge_index.shape[1], width),) if width else ()))


@pytest.mark.parametrize("name", OF_PAIRS)
def test_two_kinds_of_nodes(stated, name):
    """Pairs of features, of other sizes each time."""
    make, width = OF_PAIRS[name]
    layer = OfPairs(spread(make()))
    for sizes in SIZES:
        assert right(layer, pairs(width, *sizes))
    assert len(stated) == 1
    assert {one for s in gnnaccel.stats().values() for one in s["routes"]} == {"cuda"}


@pytest.mark.parametrize("name", OF_PAIRS)
def test_pairs_of_another_kind(stated, name):
    """One tensor after two, and twice the same; weights and widths that change."""
    make, width = OF_PAIRS[name]
    layer = spread(make())
    with torch.no_grad():
        for change in ("twice", "twice", None, "twice", "one", None, "weights", "twice", "double"):
            x, y, edge_index, *more = pairs(width, 25, 25)
            if change == "weights":
                for p in layer.parameters():
                    p.mul_(1.5)
            elif change == "double":
                layer, x, y, more = (layer.double(), x.double(), y.double(),
                                     [t.double() for t in more])
            given = {"one": x, "twice": (x, x)}.get(change, (x, y))
            with gnnaccel.disabled():
                expected = layer(given, edge_index, *more)
            assert close(layer(given, edge_index, *more), expected, 1e-4)


@pytest.mark.parametrize("wrong", ["too few", "too wide"])
def test_pairs_that_do_not_fit(stated, wrong):
    """Errors of the host's stay what they are, whatever came before."""
    layer = GATConv((F, F), 4, 2, add_self_loops=False)
    for sizes in SIZES[:3]:
        x, y, edge_index = pairs(0, *sizes)
        layer((x, y), edge_index)
    given = (x, y[:2], edge_index) if wrong == "too few" else (
        x, torch.cat([y, y], 1), edge_index)
    with gnnaccel.disabled(), pytest.raises(Exception) as theirs:
        layer(given[:2], edge_index)
    with pytest.raises(type(theirs.value)):
        layer(given[:2], edge_index)


def test_a_size_that_no_longer_fits(stated):
    """It is given for one graph, and wrong for the next."""
    layer = GATConv(F, 4, 2, add_self_loops=False)
    for _ in range(3):
        x, edge_index = inputs(0, 20)
        layer(x, edge_index, size=(20, 20))
    x, edge_index = inputs(0, 30)
    with gnnaccel.disabled(), pytest.raises(Exception) as theirs:
        layer(x, edge_index, size=(20, 20))
    with pytest.raises(type(theirs.value)):
        layer(x, edge_index, size=(20, 20))


@pytest.mark.parametrize("name", LAYERS)
def test_configurations(stated, name):
    layer, width = made(name)
    before = gnnaccel.stats()[type(layer).__name__]["routes"]["cuda"]
    with gnnaccel.enabled(exclude=[type(layer)]):
        assert right(layer, inputs(width))
    with gnnaccel.enabled(backend="torch"):
        assert right(layer, inputs(width))
    assert gnnaccel.stats()[type(layer).__name__]["routes"]["cuda"] == before
    x, *more = inputs(width)
    found = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), *more, use_reentrant=False)
    found = torch.autograd.grad(found.square().sum(), x)[0]
    with gnnaccel.disabled():
        expected = torch.autograd.grad(layer(x, *more).square().sum(), x)[0]
    assert close(found, expected, 5e-4)


def test_a_bound_call_serves_over_new_graphs(stated, monkeypatch):
    """It is bound anew only where a call is kept."""
    seen, native = [], attention_bound.bind
    monkeypatch.setattr(attention_bound, "bind", lambda *args: (seen.append(1), native(*args))[1])
    layer = GATConv(F, 4, 2)
    for _ in range(18):
        layer(*inputs(0))
    assert 4 <= len(seen) <= 7


@pytest.mark.parametrize("name", ["GATConv", "GATConv edges", "GATv2Conv"])
def test_self_loops_after_features_of_no_nodes(stated, name):
    """Edges to no nodes are an error, and say nothing of the loops that later calls get."""
    make, width = LAYERS[name]
    layer = spread(make())
    x, *rest = inputs(width)
    with pytest.raises(IndexError):
        layer(x[:0], *rest)
    for _ in range(3):
        assert right(layer, (x, *rest))
        assert right(layer, inputs(width))
