"""What autograd can be asked for: subsets of gradients, second derivatives, checkpoints, in-place
edits, accumulation."""
from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import gnnaccel
from gnnaccel.dispatch.graph import cache
from tests.pyg import graphs
from tests.pyg.judge import close, compare, judge, place, took
from tests.pyg.layers import NAMES, WITH_DROPOUT, WITH_EDGES, build


def edge_layer(name: str, **options):
    return build(name, edge_dim=graphs.EDGE, **options)


# ---- which gradients ----

@pytest.mark.long
@pytest.mark.parametrize("name", WITH_EDGES)
def test_each_gradient_alone_and_all_but_it(route, name):
    layer = edge_layer(name)
    tensors = {"x": graphs.features(), "edge_attr": graphs.edge_features(),
               **dict(layer.named_parameters())}
    ei = graphs.square()
    for chosen in tensors:
        for alone in (True, False):
            for other, t in tensors.items():
                t.requires_grad_((other == chosen) == alone)
            got = compare(route, layer, tensors["x"], ei, tensors["edge_attr"], require=False)
            assert (got.get(chosen) is not None) == alone


@pytest.mark.long
@pytest.mark.parametrize("name", ["AGNNConv", "SuperGATConv"])
def test_each_gradient_alone(route, name):
    layer, x = build(name), graphs.features()
    tensors = {"x": x, **dict(layer.named_parameters())}
    for chosen in tensors:
        for other, t in tensors.items():
            t.requires_grad_(other == chosen)
        assert compare(route, layer, x, graphs.square(), require=False,
                       train=False)[chosen] is not None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", WITH_EDGES)
def test_one_end_of_a_bipartite_graph(route, name, which):
    pair = (graphs.features(), graphs.features(graphs.M))
    pair[which].requires_grad_()
    layer = build(name, features=(12, 12)).requires_grad_(False)
    got = compare(route, layer, pair, graphs.bipartite(), require=False)
    assert got[f"x[{which}]"] is not None and f"x[{1 - which}]" not in got


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_graph(route, name, mode):
    layer, (x, ei) = build(name, device=route.device), route.put(graphs.features(), graphs.square())
    expected = layer(x, ei).detach()
    with mode(), route.on():
        got = layer(x.requires_grad_(False), ei)
    took(route, 1)
    assert not got.requires_grad and got.is_inference() == (mode is torch.inference_mode) and close(
        got, expected)


def test_inference_tensors_are_not_cached(route):
    layer, x = build("GATv2Conv", device=route.device), graphs.features().to(route.device)
    with torch.inference_mode(), route.on():
        ei = graphs.square().to(route.device).clone()
        first = layer(x, ei)
        ei[0, 0] = (ei[0, 0] + 1) % 7  # has no version that would tell
        second = layer(x, ei)
    assert cache.info()["entries"] == 0 and cache.info()["uncached"] == 2
    assert close(second.clone(), layer(x, ei.clone()).detach()) and not torch.equal(first, second)


# ---- more than one backward ----

def second_derivatives(layer, x, ei, *attr) -> dict:
    inputs = {"x": x, **({"edge_attr": attr[0]} if attr else {}), **dict(layer.named_parameters())}
    out = layer(x, ei, *attr)
    grads = torch.autograd.grad(out.tanh().sum(), list(inputs.values()), create_graph=True,
                                allow_unused=True)
    penalty = sum(g.pow(2).sum() for g in grads if g is not None)
    second = torch.autograd.grad(penalty, list(inputs.values()), allow_unused=True)
    found = {"out": out.detach(),
             **{f"first {k}": g.detach() for k, g in zip(inputs, grads) if g is not None}}
    return {**found, **{f"second {k}": g for k, g in zip(inputs, second) if g is not None}}


@pytest.mark.parametrize("name,options,edge", [
    ("GATConv", {}, False), ("GATConv", dict(edge_dim=4, residual=True), True),
    ("GATv2Conv", {}, False),
    ("GATv2Conv", dict(share_weights=True), False), ("GATv2Conv", dict(edge_dim=4), True),
    ("TransformerConv", {}, False),
    ("TransformerConv", dict(edge_dim=4, beta=True), True),
    ("TransformerConv", dict(heads=1), False), ("AGNNConv", {}, False),
    ("SuperGATConv", {}, False), ("SuperGATConv", dict(attention_type="SD"), False)], ids=str)
def test_second_derivatives(route, name, options, edge):
    layer = build(name, device=route.device, **options).eval()
    x, attr = (graphs.features().requires_grad_(),
               [graphs.edge_features().requires_grad_()] if edge else [])
    ei = graphs.square().to(route.device)

    def found(layer, dtype=None):
        return second_derivatives(layer, place(x, route.device, dtype), ei,
                                  *place(attr, route.device, dtype))

    exact, plain = found(copy.deepcopy(layer).double(), torch.float64), found(layer)
    with route.on():
        got = found(layer)
    took(route, 1)
    zero = [k for k, t in exact.items() if t.norm() < 1e-12]  # such as those of a key's bias
    drop = set(got.keys() ^ plain.keys()) | set(zero)
    assert drop <= {"first lin_key.bias", "second lin_key.bias", *zero}
    got, plain, exact = ({k: t for k, t in r.items() if k not in drop} for r in (got, plain, exact))
    assert not (wrong := judge([(got, plain, exact)], floor=2e-6)), wrong


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_after_the_edges_are_gone(route, name, deterministic):
    layer = build(name, device=route.device).eval()
    x = graphs.features().to(route.device).requires_grad_()
    torch.use_deterministic_algorithms(deterministic)
    try:
        ei = graphs.square().to(route.device)
        expected = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)[0]
        with route.on():
            out = layer(x, ei)
        ei.zero_()
        del ei
        got = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert got.requires_grad and close(got.detach(), expected, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_backward_twice(route, name):
    layer, (x, ei) = build(name, device=route.device), route.put(graphs.features(), graphs.square())
    x.requires_grad_()
    with route.on():
        out = layer(x, ei)
    once, = torch.autograd.grad(out.sum(), x, retain_graph=True)
    again, = torch.autograd.grad(out.sum(), x)
    assert close(again, once, 1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_add_up_over_calls(route, name):
    layer, ei = build(name, device=route.device).eval(), graphs.square().to(route.device)
    batches = [graphs.features().to(route.device) for _ in range(3)]

    def total():
        layer.zero_grad()
        for x in batches:
            layer(x, ei).pow(2).sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    expected = total()
    with route.on():
        got = total()
    took(route, 3)
    largest = max(g.norm() for g in expected)
    assert len(got) == len(expected) and all((a - b).norm() < 1e-5 * largest
                                             for a, b in zip(got, expected))


# ---- recomputing ----

@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_checkpoint(route, name, reentrant, dropout):
    layer, (x, ei) = build(name, dropout=dropout,
                           device=route.device), route.put(graphs.features(), graphs.square())
    x.requires_grad_()

    def gradients(call):
        torch.manual_seed(3)
        layer.zero_grad()
        out = call()
        return ([out.detach(), *torch.autograd.grad(out.pow(2).sum(), x)]
                if not reentrant else _by_backward(out, x))

    with route.on():
        expected = gradients(lambda: layer(x, ei))
        got = gradients(lambda: checkpoint(layer, x, ei, use_reentrant=reentrant))
    took(route)
    assert all(close(a, b, 1e-5) for a, b in zip(got, expected))


class _Own(torch.Tensor):
    pass


@pytest.mark.parametrize("plain", [True, False])
def test_checkpoints_of_a_subclass_of_tensor(route, plain):
    """A loss of the subclass would have the repetition make plain tensors, which is a limit that
    the guide tells of."""
    first, second = (build("GATConv", features=channels, device=route.device)
                     for channels in (graphs.F, 16))
    x, ei = route.put(graphs.features(), graphs.square())
    x = x.as_subclass(_Own).requires_grad_()
    made = []

    def call(x, ei):
        made.append(first(x, ei))
        return second(made[-1], ei)

    with route.on(on_fallback="native"):
        loss = checkpoint(call, x, ei, use_reentrant=False).pow(2).sum()
        if plain:
            loss.as_subclass(torch.Tensor).backward()
        else:
            with pytest.raises(CheckpointError):
                loss.backward()
    assert [type(t) for t in made] == [_Own, _Own if plain else torch.Tensor]


def _by_backward(out, x):
    x.grad = None
    out.pow(2).sum().backward()
    return [out.detach(), x.grad]


def test_saved_tensors_can_be_moved_away(route):
    layer, (x, ei) = build("GATv2Conv",
                           device=route.device), route.put(graphs.features(), graphs.square())
    x.requires_grad_()
    with route.on():
        expected, = torch.autograd.grad(layer(x, ei).pow(2).sum(), x)
        with torch.autograd.graph.save_on_cpu():
            out = layer(x, ei)
        got, = torch.autograd.grad(out.pow(2).sum(), x)
    assert close(got, expected, 1e-6)


# ---- in place ----

@pytest.mark.parametrize("options",
                         [{}, dict(bias=False), dict(concat=False), dict(bias=False, concat=False)],
                         ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_can_be_changed_in_place(route, name, options):
    if name == "AGNNConv" and options:
        pytest.skip("AGNNConv has no such options")
    if name == "TransformerConv" and "bias" in options:
        options = {**options, "root_weight": False}
    layer, (x, ei) = build(name, device=route.device,
                           **options).eval(), route.put(graphs.features(), graphs.square())
    x.requires_grad_()

    def found():
        out = layer(x, ei).relu_()
        return [out.detach(), *torch.autograd.grad(out.pow(2).sum(), x)]

    expected = found()
    with route.on():
        got = found()
    took(route, 1)
    assert all(close(a, b) for a, b in zip(got, expected))


def test_the_input_cannot_be_changed_unseen(route):
    """A leaf that backward needs: autograd has to object, or the gradient would be of other
    numbers."""
    layer, (x, ei) = build("AGNNConv",
                           device=route.device), route.put(graphs.features(), graphs.square())
    with route.on():
        h = x.requires_grad_() * 1.0
        out = layer(h, ei)
    h.data.add_(0)  # unseen, and the same numbers
    h.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- anomalies ----

def test_detect_anomaly(route):
    layer, (x, ei) = build("GATConv",
                           device=route.device), route.put(graphs.features(), graphs.square())
    with route.on(), torch.autograd.detect_anomaly(check_nan=True):
        layer(x.requires_grad_(), ei).sum().backward()
    assert gnnaccel.stats()["GATConv"]["routes"] == {route.backend: 1}


def test_nan_in_one_row_spreads_as_natively(route):
    layer, (x, ei) = build("GATConv",
                           device=route.device), route.put(graphs.features(), graphs.square())
    x[9] = float("nan")
    expected = layer(x, ei).isnan().any(-1)
    with route.on():
        got = layer(x, ei).isnan().any(-1)
    assert expected.any() and not expected.all() and torch.equal(got, expected)


# ---- many gradients at once ----

class Own(MessagePassing):
    def __init__(self):
        super().__init__()
        self.att = torch.nn.Parameter(torch.randn(12))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index):
        score = (torch.tanh(x_i + x_j) * self.att).sum(-1)
        return x_j * softmax(score, index).unsqueeze(-1)


def vmapped(out, x, rows):
    return torch.vmap(lambda row: torch.autograd.grad(out, x, row, retain_graph=True)[0])(rows)


def vmapped_twice(out, x, rows):
    return vmapped_inside(out, x, rows.unflatten(0, (2, -1))).flatten(0, 1)


def vmapped_inside(out, x, rows):
    return torch.vmap(lambda row: vmapped(out, x, row))(rows)


def batched(out, x, rows):
    return torch.autograd.grad(out, x, rows, is_grads_batched=True)[0]


def recorded(out, x, rows):
    found = torch.autograd.grad(out, x, rows, is_grads_batched=True, create_graph=True)[0]
    return torch.autograd.grad((found * x.sin()).sum(), x)[0]


@pytest.mark.parametrize("many", [vmapped, vmapped_twice, batched, recorded])
@pytest.mark.parametrize("name", ["Own", "GATConv", "TransformerConv", "GCNConv", "RGCNConv"])
def test_many_gradients_at_once(route, name, many):
    layer = Own() if name == "Own" else {
        "GCNConv": lambda: pyg.GCNConv(12, 4), "RGCNConv": lambda: pyg.RGCNConv(12, 4, 3),
    }.get(name, lambda: build(name))()
    layer, args = layer.to(route.device), route.put(graphs.features(), graphs.square())
    if name == "RGCNConv":
        args += route.put(torch.arange(graphs.E) % 3)
    x = args[0].requires_grad_()

    def call():
        out = layer(*args)
        return many(out, x, torch.linspace(-1, 1, 4 * out.numel()).view(4, *out.shape).to(x))

    expected = call()
    with route.on(on_fallback="native"):
        assert close(call(), expected)


def imaginary(out):
    """A loss in which ``out`` is the imaginary part of complex numbers, as in scores of links."""
    score = torch.complex(torch.ones_like(out), out).conj() * torch.tensor(0.3 - 2j).to(out.device)
    return (score.real * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)).sum()


@pytest.mark.parametrize("name", [*NAMES, "Own", "GCNConv", "RGCNConv", "scatter", "softmax"])
def test_gradients_that_negate_their_numbers(route, name):
    """The gradient of an imaginary part may be a view whose memory holds the opposites."""
    layer = {"GCNConv": lambda: pyg.GCNConv(12, 4), "RGCNConv": lambda: pyg.RGCNConv(12, 4, 3),
             "Own": Own, "scatter": lambda: utils.scatter, "softmax": lambda: utils.softmax,
             }.get(name, lambda: build(name))()
    x, edge_index = route.put(graphs.features(), graphs.square())
    args, options = [x.requires_grad_(), edge_index], {}
    if name == "RGCNConv":
        args += route.put(torch.arange(graphs.E) % 3)
    elif name in ("scatter", "softmax"):
        args[1] = edge_index[1, :len(x)]
        options = {"reduce": "max"} if name == "scatter" else {"num_nodes": len(x)}
    parameters = ([*layer.to(route.device).parameters()] if isinstance(layer, torch.nn.Module)
                  else [])

    def call():
        function = getattr(utils, name) if name in ("scatter", "softmax") else layer
        out, negated = function(*args, **options), []
        out.register_hook(lambda grad: negated.append(grad.is_neg()))
        found = torch.autograd.grad(imaginary(out), [x, *parameters], retain_graph=True)
        assert negated == [True]
        rows = torch._neg_view(torch.linspace(-1, 1, 2 * out.numel()).view(2, *out.shape).to(x))
        return [*found, *torch.autograd.grad(out, x, rows, is_grads_batched=True)]

    expected = call()
    with route.on(on_fallback="native"):
        for one, two in zip(call(), expected):
            assert torch.allclose(one, two, rtol=1e-3, atol=1e-5)
