"""What holds for all of DGL's attention layers: forms of graphs, order of edges, dtypes,
derivatives, hooks, native calls."""
from __future__ import annotations

import dgl
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import gnnaccel
from tests.dgl import graphs
from tests.dgl.graphs import E, N
from tests.dgl.judge import close, compare, took
from tests.dgl.layers import (NAMES, REFUSING, WITH_DROPOUT, WITH_EDGES, arguments, build,
                              edge_features)
from tests.judge import place

each = pytest.mark.parametrize("name", NAMES)


def results(name: str, layer, args) -> tuple:
    """Outputs, then gradients of every parameter."""
    layer.zero_grad()
    out = layer(*args)
    out = out if isinstance(out, tuple) else (out,)
    sum(t.square().sum() for t in out).backward()
    return (*(t.detach() for t in out), *(p.grad for p in layer.parameters()))


# ---- graphs ----

@each
def test_id_dtypes(route, name):
    compare(route, build(name), *arguments(name, graphs.square().int()), floor=1e-6)


@pytest.mark.parametrize("name", REFUSING)
def test_nodes_without_edges_where_they_are_allowed(route, name):
    g = dgl.graph((torch.randint(0, N, (90,)), torch.randint(0, N // 2, (90,))), num_nodes=N)
    compare(route, build(name, allow_zero_in_degree=True), *arguments(name, g), floor=1e-6)


@pytest.mark.parametrize("name", REFUSING)
def test_nodes_without_edges_where_they_are_not(route, name):
    g = dgl.graph((torch.randint(0, N, (90,)), torch.randint(0, N // 2, (90,))), num_nodes=N)
    layer, args = build(name).to(route.device), place(arguments(name, g), route.device)
    with route.on(on_fallback="native"), pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(*args)
    assert gnnaccel.stats()[name]["reasons"] == {"GA204": 1}


@pytest.mark.parametrize("name", WITH_EDGES)
@pytest.mark.parametrize("form", ["as made", "sorted", "all", "csc", "reversed twice"])
def test_features_go_with_the_ids_of_edges(route, name, form):
    """However the graph holds its edges."""
    g = graphs.square()
    if form == "sorted":
        order = g.edges()[1].argsort(stable=True)
        g = dgl.graph((g.edges()[0][order], g.edges()[1][order]), num_nodes=N)
    elif form in ("all", "csc"):
        g.create_formats_()
        g = g if form == "all" else g.formats(["csc", "coo"])
    elif form == "reversed twice":
        g = dgl.reverse(dgl.reverse(g))
    compare(route, build(name), *arguments(name, g), floor=1e-6)


@pytest.mark.parametrize("name", WITH_EDGES)
def test_another_order_of_edges_gives_the_same(route, name):
    g = graphs.square()
    u, v = g.edges()
    order = torch.randperm(E)
    layer, (_, x, e) = build(name).to(route.device), arguments(name, g)
    with route.on(), torch.no_grad():
        expected, got = (layer(*place(args, route.device)) for args in
                         ((g, x, e), (dgl.graph((u[order], v[order]), num_nodes=N), x, e[order])))
    if name == "EGATConv":
        assert close(got[1], expected[1][order.to(route.device)])
        got, expected = got[0], expected[0]
    assert close(got, expected)


@each
def test_one_edge_and_one_node(route, name):
    g = dgl.graph(([0], [0]))
    compare(route, build(name), *arguments(name, g), floor=1e-6)


@each
def test_graphs_in_a_row(route, name):
    """Each call has the structure of its own graph."""
    layer = build(name).to(route.device)
    for _ in range(3):
        args = place(arguments(name, graphs.square()), route.device)
        expected = results(name, layer, args)
        with route.on():
            got = [results(name, layer, args) for _ in range(2)]
        assert all(close(a, b, 1e-4) for again in got for a, b in zip(again, expected))


@each
def test_graphs_without_edges_are_left_to_dgl(route, name):
    g = dgl.graph(([], []), num_nodes=N)
    layer = build(name,
                  **({"allow_zero_in_degree": True} if name in REFUSING else {})).to(route.device)
    args = place(arguments(name, g), route.device)
    with route.on(on_fallback="native"):
        if name in REFUSING:
            assert layer(*args).shape[0] == N
        else:
            with pytest.raises(dgl.DGLError):
                layer(*args)
    assert gnnaccel.stats()[name]["reasons"] == {"GA303": 1}


# ---- results ----

@each
def test_the_result_can_be_viewed_and_changed_in_place(route, name):
    layer = build(name).to(route.device)
    args = place(arguments(name, graphs.square()), route.device)

    def once():
        out = layer(*args)
        out = out[0] if isinstance(out, tuple) else out
        out.mul_(2.0)
        value = out.view(N, -1).square().sum()
        return value.detach(), *torch.autograd.grad(value, list(layer.parameters()),
                                                    allow_unused=True)

    expected = once()
    with route.on():
        got = once()
    assert all(a is None and b is None or close(a, b, 1e-4) for a, b in zip(got, expected))


@each
def test_the_users_frames_are_left_alone(route, name):
    layer, (g, *args) = build(name).to(route.device), place(arguments(name, graphs.square()),
                                                            route.device)
    g.ndata["ft"], g.edata["a"] = torch.ones(N, 1,
                                             device=route.device), torch.arange(E,
                                                                                device=route.device)
    with route.on():
        layer(g, *args)
    assert set(g.ndata) == {"ft"} and set(g.edata) == {"a"} and bool((g.ndata["ft"] == 1).all())


# ---- derivatives ----

def in_fp64(name: str):
    """A function of everything differentiable, and those tensors; on a tiny graph with
    duplicates."""
    g = dgl.graph(([0, 1, 2, 0, 0, 3], [0, 1, 2, 1, 1, 3]))
    layer = build(name, width=2, features=3).double()
    names = [n for n, _ in layer.named_parameters()]
    x = [t.double().requires_grad_()
         for t in (torch.randn(4, 3), edge_features(g))[:1 + (name in WITH_EDGES)]]

    def call(*tensors):
        return torch.func.functional_call(layer, dict(zip(names, tensors[len(x):])),
                                          (g, *tensors[:len(x)]))

    return call, (*x, *(p.detach().requires_grad_() for p in layer.parameters()))


@each
def test_gradients_in_fp64(name):
    call, tensors = in_fp64(name)
    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert gradcheck(call, tensors)


# DGL's u_add_v in it has no second derivatives
@pytest.mark.parametrize("name", [n for n in NAMES if n != "EGATConv"])
def test_second_derivatives_in_fp64(name):
    call, tensors = in_fp64(name)
    with gnnaccel.enabled(backend="torch", when="supported", on_fallback="raise"):
        assert gradgradcheck(call, tensors, fast_mode=True)


# ---- dtypes ----

@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(route, name, dtype):
    """DGL itself takes no float16 on a CPU."""
    layer = build(name).to(route.device)
    args = place(arguments(name, graphs.square()), route.device)
    first = (lambda out: out[0]) if name == "EGATConv" else lambda out: out
    if name == "EGATConv" and dtype is torch.float16 and route.device.type == "cpu":
        pytest.skip("the features of edges are DGL's own")
    exact, layer = first(layer(*args)), layer.to(dtype)
    args = place(args, route.device, dtype)
    with route.on():
        got = first(layer(*args))
    native = first(layer(*args)) if dtype is torch.bfloat16 else exact.to(dtype)
    assert got.dtype == native.dtype == dtype
    allowed = 1.5 * (native - exact).norm() if dtype is torch.bfloat16 else 0.0
    assert (got - exact).norm() <= allowed + 3e-3 * exact.norm()
    got.float().square().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in layer.parameters())


@each
def test_autocast_on_a_cpu_is_left_to_dgl(name):
    """There DGL refuses most of what comes of it, each layer in its own way."""
    layer, args = build(name), arguments(name, graphs.square())
    with gnnaccel.enabled(backend="torch",
                          when="supported"), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            layer(*args)
        except (dgl.DGLError, RuntimeError):
            pass
    assert gnnaccel.stats()[name]["reasons"] == {"GA203": 1}


@each
def test_features_of_another_dtype_are_left_to_dgl(name):
    layer, args = build(name), place(arguments(name, graphs.square()), "cpu", torch.float64)
    with gnnaccel.enabled(backend="torch", when="supported"):
        if name == "AGNNConv":
            layer(*args)
        else:
            with pytest.raises(RuntimeError if name != "DotGatConv" else Exception):
                layer(*args)
    # its map raises what the host's map raises
    expected = {} if name == "DotGatConv" else {"GA203": 1}
    assert gnnaccel.stats()[name]["reasons"] == expected


# ---- modules inside ----

@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.parametrize("part", ["attn_drop", "leaky_relu"])
@pytest.mark.parametrize("how", ["hook", "subclass", "forward"])
def test_what_is_left_to_dgl(route, name, part, how):
    layer, code = build(name), "GA205"
    if how == "hook":
        getattr(layer, part).register_forward_hook(lambda *args: None)
        code = "GA501"
    elif how == "subclass":
        setattr(layer, part, torch.nn.Identity())
    else:
        getattr(layer, part).forward = lambda t: t
    layer, args = layer.to(route.device), place(arguments(name, graphs.square()), route.device)
    expected = layer(*args)
    with route.on(on_fallback="native"):
        torch.testing.assert_close(layer(*args), expected, rtol=0, atol=0)
    assert gnnaccel.stats()[name]["reasons"] == {code: 1}


@each
def test_hooks_on_other_modules_run_as_often_and_see_the_same(route, name):
    layer = build(name).to(route.device)
    args = place(arguments(name, graphs.square()), route.device)
    seen: list[tuple] = []
    for part, module in layer.named_children():
        if part not in ("attn_drop", "leaky_relu", "fc_edge"):
            module.register_forward_hook(lambda m, i, o,
                                         part=part: seen.append((part, i[0].shape, o.shape)))
    layer(*args)
    native = seen[:]
    seen.clear()
    with route.on():
        layer(*args)
    assert sorted(seen, key=str) == sorted(native, key=str)


@each
def test_a_subclass_with_a_forward_of_its_own(route, name):
    """It may call the layer's, which is taken over."""
    cls = type(build(name))
    layer = build(name).to(route.device)
    layer.__class__ = type("Mine", (cls,),
                           {"forward": lambda self, *args: cls.forward(self, *args)})
    args = place(arguments(name, graphs.square()), route.device)
    with route.on():
        layer(*args)
    took(route, 1)


# ---- dropout ----

COPIES = 250


def many_draws(layer, args) -> torch.Tensor:
    """[COPIES, N, ...]: one call on copies of the graph side by side, each with its own draw."""
    g, *rows = args
    with torch.no_grad():
        out = layer(dgl.batch([g] * COPIES), *(t.repeat(COPIES, 1) for t in rows))
    return out.view(COPIES, N, -1).double()


@pytest.mark.parametrize("p", [0.2, 0.6])
@pytest.mark.parametrize("name", WITH_DROPOUT)
@pytest.mark.long
def test_distribution_of_attention_dropout(route, name, p):
    layer = build(name, heads=1, attn_drop=p).to(route.device)
    args = place(arguments(name, graphs.square()), route.device)
    with route.on():
        got = many_draws(layer, args)
    took(route, 1)
    native = many_draws(layer, args)
    with torch.no_grad():
        expected = layer.eval()(*args).view(N, -1).double()
    spread = native.std(0)
    z = (got.mean(0) - expected) / (spread / COPIES**0.5)
    assert z.abs().max() < 6 and 0.7 < z.pow(2).mean().sqrt() < 1.4
    ratio = got.std(0) / spread
    assert 0.9 < ratio.mean() < 1.1 and ratio.min() > 0.5 and ratio.max() < 2.0


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_everything_dropped(route, name):
    compare(route, build(name, attn_drop=1.0), *arguments(name, graphs.square()), floor=1e-6)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_the_dropouts_own_mode_counts(route, name):
    layer = build(name, attn_drop=0.7).to(route.device)
    args = place(arguments(name, graphs.square()), route.device)
    layer.attn_drop.eval()
    expected = layer(*args)
    with route.on():
        assert close(layer(*args), expected)
    layer.eval().attn_drop.train()
    with route.on():
        assert not close(layer(*args), expected, 0.01)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_backward_uses_the_mask_of_forward(route, name):
    layer, (g, x, *rest) = build(name,
                                 attn_drop=0.5).to(route.device), place(arguments(name,
                                                                                  graphs.square()),
                                                                        route.device)
    x, weight = x * 0.5, torch.linspace(-1, 1, N, device=route.device).view(-1, 1, 1)
    direction = torch.randn_like(x) * 1e-3

    def value(x):
        torch.manual_seed(5)
        return (layer(g, x, *rest).tanh() * weight).sum()

    with route.on():
        with torch.no_grad():
            difference = value(x + direction) - value(x - direction)
        x.requires_grad_()
        grad, = torch.autograd.grad(value(x), x)
    torch.testing.assert_close(difference, 2 * (grad * direction).sum(), rtol=0.03, atol=2e-5)


# ---- on a CPU ----

@each
def test_nothing_is_taken_over_on_a_cpu_without_a_measured_gain(name):
    with gnnaccel.enabled():
        build(name)(*arguments(name, graphs.square()))
    assert gnnaccel.stats()[name]["routes"] == {"native": 1}


@each
def test_gradients_of_parameters_lie_in_order(route, name):
    """Users take ``grad.view(-1)``."""
    layer = build(name, allow_zero_in_degree=True) if name in REFUSING else build(name)
    layer, args = layer.to(route.device), place(arguments(name, graphs.square()), route.device)
    with route.on():
        out = layer(*args)
    loss = sum(t.sin().sum() for t in (out if isinstance(out, tuple) else (out,)))
    found = torch.autograd.grad(loss, [*layer.parameters()], allow_unused=True)
    assert all(grad is None or grad.is_contiguous() for grad in found)
