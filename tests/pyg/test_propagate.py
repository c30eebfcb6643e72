"""Layers that users wrote, with stock messages: one operation over the graph, against PyG's own
propagate."""
from __future__ import annotations

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

import gnnaccel
from tests.pyg import graphs
from tests.pyg.graphs import E, F, M, N
from tests.pyg.judge import close, compare, on_routes, took
from tests.pyg.own_layers import (POSITIONS, Copying, Differing, Gating, GatingBoth, Heads,
                                  Inherited, Rectifying, Updating, Weighing)


@on_routes("aggr", ["sum", "add", "mean"])
def test_sums_and_means(route, aggr):
    compare(route, Weighing(aggr=aggr), graphs.features(), graphs.square(), torch.randn(E),
            positions=POSITIONS)
    compare(route, Copying(aggr=aggr), graphs.features(), graphs.square(), positions=POSITIONS)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_extrema(route, aggr):
    """Equal messages included: the gradient is shared."""
    x = torch.randn(N, F).round()
    compare(route, Weighing(aggr=aggr), x, graphs.square(), torch.randn(E), positions=POSITIONS)
    compare(route, Copying(aggr=aggr), x, graphs.square(), positions=POSITIONS)


@on_routes("width", [1, 7, 64], [128, 200])
def test_widths(route, width):
    compare(route, Weighing(), graphs.features(N, width), graphs.square(), torch.randn(E),
            positions=POSITIONS)


def test_messages_of_the_base_class(route):
    compare(route, Inherited(), graphs.features(), graphs.square(), positions=POSITIONS)


def test_absent_weights(route):
    compare(route, Weighing(), graphs.features(), graphs.square(), positions=POSITIONS)


@on_routes("width", [1, 5])
def test_heads(route, width):
    compare(route, Heads(), torch.randn(N, 3, width), graphs.square(), torch.randn(E, 3),
            positions=POSITIONS)
    compare(route, Heads(aggr="mean"), torch.randn(N, 3, width), graphs.square(), torch.randn(E, 1),
            positions=POSITIONS)


def test_weights_per_channel(route):
    compare(route, Gating(), graphs.features(), graphs.square(), torch.randn(E, F),
            positions=POSITIONS)


@pytest.mark.parametrize("cls, aggr, width",
                         [(Differing, "sum", 0), (Differing, "mean", None), (Rectifying, "mean", F),
                          (Rectifying, ["sum", "max"], F), (GatingBoth, "sum", F),
                          (GatingBoth, "mean", 0)])
def test_messages_of_more_than_neighbours(route, cls, aggr, width):
    """``width``: of what edges have; 0: nothing, None: one weight each."""
    more = () if width == 0 else (torch.rand(E) + 0.1 if width is None else torch.randn(E, width),)
    compare(route, cls(aggr=aggr), graphs.features(), graphs.square(), *more, positions=POSITIONS,
            floor=1e-6)


@pytest.mark.parametrize("cls", [Differing, Rectifying])
def test_messages_of_more_against_the_flow(route, cls):
    more = (torch.randn(E, F),) if cls is Rectifying else ()
    compare(route, cls(flow="target_to_source"), graphs.features(), graphs.square(), *more,
            positions=POSITIONS, floor=1e-6)


def test_an_unused_end_says_how_many_nodes_there_are(route):
    """As PyG has it: the arguments of ``message`` give the sizes, whether it uses them or not."""
    class Unused(MessagePassing):
        def forward(self, x, edge_index, own):
            return self.propagate(edge_index, x=x, own=own)

        def message(self, x_j, own_i):
            return x_j

    args = [t.to(route.device)
            for t in (graphs.features(), graphs.bipartite(), graphs.features(M, 2))]
    expected = Unused()(*args)
    with route.on():
        assert expected.shape[0] == M and close(Unused()(*args), expected)


@pytest.mark.parametrize("mode", ["cat", "sum", "proj"])
def test_several_aggregations(route, mode):
    options = dict(in_channels=F, out_channels=5) if mode == "proj" else {}
    layer = Weighing(aggr=["sum", "mean"], aggr_kwargs=dict(mode=mode, mode_kwargs=options))
    compare(route, layer, graphs.features(), graphs.square(), torch.randn(E), positions=POSITIONS)


def test_aggregations_that_share_a_pass(emulated):
    args = graphs.features(), graphs.square(), torch.randn(E)
    for aggr, kernel in ((["mean", "max", "sum"], "fused mean, max, sum"),
                         (["sum", "mean"], "fused sum + fused mean")):
        layer = Weighing(aggr=aggr)
        expected = layer(*args)
        with emulated.on(records=1):
            assert close(layer(*args), expected)
            assert gnnaccel.records()[0]["kernel"] == kernel
        gnnaccel.clear_records()


def test_several_aggregations_of_which_one_is_native():
    layer, args = Weighing(aggr=["sum", "mul"]), (graphs.features(), graphs.square())
    expected = layer(*args)
    hooked_inside = Weighing(aggr=["sum", "mean"])
    hooked_inside.aggr_module.aggrs[1].register_forward_hook(lambda module, given, out: 2 * out)
    doubled = hooked_inside(*args)
    with gnnaccel.enabled(when="supported"):
        assert torch.equal(layer(*args), expected) and torch.equal(hooked_inside(*args), doubled)
    assert gnnaccel.stats()["Weighing"]["reasons"] == {"GA201": 2}


def test_update(route):
    compare(route, Updating(), graphs.features(), graphs.square(), positions=POSITIONS)


# ---- graphs ----

@on_routes("pair", ["both", "source alone"])
def test_two_kinds_of_nodes(route, pair):
    x = (graphs.features(), graphs.features(M, 5) if pair == "both" else None)
    size = None if pair == "both" else (N, M)
    compare(route, Weighing(), x, graphs.bipartite(), torch.randn(E), size=size,
            positions=POSITIONS, require=False)


def test_sizes(route):
    compare(route, Copying(), graphs.features(), graphs.bipartite(), (N, M),
            positions=("x", "edge_index", "size"))
    compare(route, Copying(), graphs.features(), graphs.square(), (N, None),
            positions=("x", "edge_index", "size"))


def test_sizes_that_do_not_fit(route):
    layer = Copying()
    with route.on(on_fallback="native"), pytest.raises(ValueError, match="expected size"):
        layer(graphs.features().to(route.device), graphs.square().to(route.device), (N + 1, N))


def test_against_the_flow(route):
    compare(route, Weighing(flow="target_to_source"), graphs.features(), graphs.square(),
            torch.randn(E), positions=POSITIONS)
    compare(route, Copying(flow="target_to_source", aggr="mean"), graphs.features(),
            graphs.bipartite().flip(0), (M, N), positions=("x", "edge_index", "size"))


def test_edge_index_of_pygs(route):
    ei = graphs.square()
    layer, x = Weighing(), graphs.features().to(route.device)
    w = torch.randn(E).to(route.device)
    kept = EdgeIndex(ei.to(route.device), sparse_size=(N, N))
    expected = layer(x, kept, w)
    with route.on():
        assert close(layer(x, kept, w), expected)
    took(route, 1)


def test_one_graph_in_both_directions(route):
    """The structures of a graph and of its reverse are told apart."""
    x, ei = graphs.features().to(route.device), graphs.square().to(route.device)
    there, back = Copying(), Copying(flow="target_to_source")
    expected = there(x, ei), back(x, ei)
    for _ in range(2):
        with route.on():
            assert close(there(x, ei), expected[0]) and close(back(x, ei), expected[1])


# ---- modes ----

@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    with mode():
        expected = layer(x, ei)
        with route.on():
            for _ in range(2):
                assert close(layer(x, ei), expected)
    with route.on():  # what was built inside is good for training
        layer(x.clone().requires_grad_(), ei).sum().backward()
    took(route, 3)


def test_edges_made_in_inference_mode(route):
    layer, x = Weighing(), graphs.features().to(route.device)
    with torch.inference_mode():
        ei = graphs.square().to(route.device)
        expected = layer(x, ei)
        with route.on():
            assert close(layer(x, ei), expected)


def test_second_derivatives(route):
    layer, ei = Weighing(aggr="mean"), graphs.square()
    x, w = torch.randn(N, 3), torch.randn(E)

    def second(device, dtype):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, w)]
        grads = torch.autograd.grad(layer(leaves[0], ei.to(device), leaves[1]).pow(3).sum(), leaves,
                                    create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)

    exact = second("cpu", torch.float64)
    with route.on():
        got = second(route.device, torch.float32)
    assert all(close(a.cpu().double(), b, 5e-5) for a, b in zip(got, exact))


def test_deterministic_mode(route):
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    torch.use_deterministic_algorithms(True)
    try:
        with route.on():
            outs = [layer(x.clone().requires_grad_(), ei) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*outs)


def test_autocast(emulated):
    """A layer's features are of the half type then, its weights are not: the messages, and so the
    result, are fp32."""
    layer, x, ei, w = Weighing(), graphs.features().bfloat16(), graphs.square(), torch.randn(E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x, ei, w)
        with emulated.on():
            for _ in range(2):
                got = layer(x, ei, w)
                assert got.dtype == expected.dtype == torch.float32 and close(got, expected)
    exact = layer(x.double(), ei)
    with emulated.on():
        got = layer(x, ei)
    assert got.dtype == torch.bfloat16 and close(got.double(), exact, 1e-2)


def test_transforms_are_left_to_pyg():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    with gnnaccel.enabled(when="supported"):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert torch.autograd.forward_ad.unpack_dual(layer(dual, ei)).tangent is not None
    assert gnnaccel.stats()["Copying"]["reasons"] == {"GA405": 1}


@pytest.mark.long
def test_compiled_regions():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    expected = layer(x, ei)
    with gnnaccel.enabled(when="supported"):
        assert close(torch.compile(layer, backend="eager")(x, ei), expected)
    assert not gnnaccel.stats()


def test_tracing():
    layer, x, ei = Copying(), graphs.features(), graphs.square()
    with gnnaccel.enabled(when="supported"):
        traced = torch.jit.trace(layer, (x, ei))
    assert close(traced(x, ei), layer(x, ei))


def test_results_changed_in_place(route):
    """As users do with ``relu_``."""
    layer, x, ei = Weighing(), graphs.features().to(route.device), graphs.square().to(route.device)
    w = torch.randn(E).to(route.device)

    def gradients():
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = layer(leaves[0], ei, leaves[1])
        out += 0.5
        out.relu_().sum().backward()
        return [t.grad for t in leaves]

    expected = gradients()
    with route.on():
        for _ in range(2):
            assert all(map(close, gradients(), expected))


def test_a_native_call_in_a_checkpoint_repeats_what_reading_it_computed(emulated):
    """The weight, which is computed to decide the call, is saved for backward: both times or not
    at all."""
    from torch.utils.checkpoint import checkpoint

    class Both(MessagePassing):
        def forward(self, x, edge_index, edge_weight):
            return self.propagate(edge_index, x=x, edge_weight=edge_weight)

        def message(self, x_j, x_i, edge_weight):
            return (x_i + x_j) * edge_weight.view(-1, 1).sigmoid()

    layer, ei = Both(aggr="add"), graphs.square()  # in fp64, which kernels do not take
    x, weight = graphs.features().double().requires_grad_(), torch.randn(E).double()
    weight.requires_grad_()
    expected = torch.autograd.grad(layer(x, ei, weight).sum(), (x, weight))
    with emulated.on(on_fallback="native"):
        for _ in range(3):
            out = checkpoint(layer, x, ei, weight, use_reentrant=False)
            x.grad = weight.grad = None
            out.sum().backward()
            assert close(x.grad, expected[0]) and close(weight.grad, expected[1])
    assert gnnaccel.stats()["Both"]["routes"] == {"native": 6}
