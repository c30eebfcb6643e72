"""``scatter``, ``segment``, ``softmax`` and the functions for pooling, against PyG's own."""
from __future__ import annotations

import pickle
import sys
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric import nn, utils
# by a user, before enable()
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool

import gnnaccel
from gnnaccel.adapters.pyg.propagate import scatter as adapter
from gnnaccel.dispatch.ops import aggregation_cost, by_index
from gnnaccel.dispatch.policy import config
from gnnaccel.dispatch.policy.reasons import reason
from tests.helpers import assert_accurate
from tests.pyg.judge import took
from tests.pyg.test_gpu import no_waiting
from tests.routes import opened

ROWS, GROUPS = 40, 9
NATIVE = {name: getattr(utils, name) for name in ("scatter", "segment", "softmax")}


def index(rows: int = ROWS, groups: int = GROUPS) -> torch.Tensor:
    """Sorted, with a hub, and with empty groups between others and behind them."""
    found = torch.randint(0, groups - 2, (rows,))
    found[:rows // 3] = 2
    return torch.where(found == 1, 3, found).sort().values


def offsets(index: torch.Tensor, groups: int = GROUPS) -> torch.Tensor:
    return (torch._convert_indices_to_csr(index, groups)
            if hasattr(torch, "_convert_indices_to_csr") else (
        torch.searchsorted(index, torch.arange(groups + 1))))


def results(function, x: torch.Tensor):
    """``function`` of ``x`` and the gradient of ``x``."""
    leaf = x.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG's advice to install torch-scatter
        out = function(leaf)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weights.to(out)).sum().backward()
    return out.detach(), leaf.grad


def judged(route, name: str, x: torch.Tensor, *tensors, **options):
    """One operation on the route against PyG's in fp32 and fp64."""
    native, exact = (results(lambda t: NATIVE[name](t, *tensors, **options), x.to(d))
                     for d in (torch.float32, torch.float64))
    moved = [t.to(route.device) if isinstance(t, torch.Tensor) else t for t in tensors]
    with route.on():
        got = results(lambda t: getattr(utils, name)(t, *moved, **options), x.to(route.device))
    for what, mine, theirs, truth in zip(("out", "d_x"), got, native, exact):
        assert_accurate(what, mine.cpu(), theirs, truth)
    assert gnnaccel.stats().pop(f"pyg.{name}")["routes"] == {route.backend: 1}
    gnnaccel.reset_stats()


@pytest.mark.parametrize("reduce", by_index.REDUCES)
def test_double_precision_on_torch_operations(reduce):
    x, groups = torch.randn(ROWS, 3, dtype=torch.float64), index()
    expected = results(lambda t: NATIVE["scatter"](t, groups, reduce=reduce), x)
    with gnnaccel.enabled(backend="torch", when="supported"):
        got = results(lambda t: utils.scatter(t, groups, reduce=reduce), x)
    assert gnnaccel.stats()["pyg.scatter"]["routes"] == {"torch": 1}
    for mine, theirs in zip(got, expected):
        assert (mine - theirs).abs().max() < 1e-14 * theirs.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("reduce", by_index.REDUCES)
def test_reductions(route, reduce):
    """Ties included; sorted or not; any features."""
    for shape, given_index in (((6,), index()), ((), index()),
                               ((2, 3), index()[torch.randperm(ROWS)]), ((1,), index())):
        x = torch.randn(ROWS, *shape).mul(2).round()
        judged(route, "scatter", x, given_index, dim_size=GROUPS, reduce=reduce)
    judged(route, "scatter", torch.randn(6, ROWS).t(), index(), dim=-2, reduce=reduce)
    if reduce in ("sum", "mean"):
        judged(route, "segment", torch.randn(ROWS, 6), offsets(index()), reduce=reduce)


def test_softmax(route):
    for shape in ((), (6,), (2, 3)):
        judged(route, "softmax", 20 * torch.randn(ROWS, *shape), index()[torch.randperm(ROWS)],
               num_nodes=GROUPS)
    judged(route, "softmax", torch.randn(ROWS, 6), index())


def test_infinities(route):
    x = torch.randn(ROWS, 6)
    x[3], x[-1] = float("inf"), float("-inf")
    for name, by in (("scatter", index()), ("segment", offsets(index()))):
        expected = NATIVE[name](x, by, reduce="max")
        with route.on():
            assert torch.equal(getattr(utils, name)(x.to(route.device), by.to(route.device),
                                                    reduce="max").cpu(), expected)
    assert gnnaccel.stats()["pyg.segment"]["routes"] == {route.backend: 1}


@pytest.mark.long
def test_pools(route):
    """By names imported before; what the host asks of the device is asked once."""
    x, batch = torch.randn(ROWS, 6), index()
    for pool in (global_add_pool, global_mean_pool, global_max_pool):
        assert_pool(route, pool, x, batch)
        assert_pool(route, pool, x[:, 0], batch, GROUPS)
    assert gnnaccel.stats()["pyg.scatter"]["routes"] == {route.backend: 6}
    expected = global_add_pool(x, None)
    with route.on():
        assert torch.equal(global_add_pool(x, None), expected)


def assert_pool(route, pool, x, batch, size=None):
    native, exact = (results(lambda t: pool(t, batch, size), x.to(d))
                     for d in (torch.float32, torch.float64))
    with route.on():
        got = results(lambda t: pool(t, batch.to(route.device), size), x.to(route.device))
    for what, mine, theirs, truth in zip(("out", "d_x"), got, native, exact):
        assert_accurate(what, mine.cpu(), theirs, truth)


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups=st.integers(1, 5), rows=st.integers(1, 12), width=st.sampled_from([1, 6]),
       reduce=st.sampled_from(by_index.REDUCES), data=st.data())
def test_ugly_indices(groups, rows, width, reduce, data):
    given_index = torch.tensor(data.draw(st.lists(st.integers(0, groups - 1), min_size=rows,
                                                  max_size=rows)))
    # not contiguous, with ties
    x = torch.arange(rows * width * 2, dtype=torch.float32).view(rows, -1)[:, ::2] % 5 - 2
    with opened("emulated") as route:
        judged(route, "scatter", x, given_index, dim_size=groups + 1, reduce=reduce)


def test_second_derivatives(route):
    x, by = torch.randn(ROWS, 6), index()

    def second(operation, device, dtype):
        leaf = x.to(device, dtype).requires_grad_()
        grad, = torch.autograd.grad(operation(leaf, by.to(device)).pow(3).sum(), leaf,
                                    create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), leaf)[0].cpu().double()

    for operation in (lambda t, i: utils.scatter(t, i, reduce="mean"), lambda t,
                      i: utils.scatter(t, i, reduce="max"), lambda t, i: utils.softmax(t, i)):
        exact = second(operation, "cpu", torch.float64)
        with route.on():
            assert torch.allclose(second(operation, route.device, torch.float32), exact, rtol=1e-4,
                                  atol=1e-4)


def test_half_precision(emulated):
    x, by = torch.randn(ROWS, 4).bfloat16(), index()
    for operation in (lambda t: utils.scatter(t, by, reduce="mean"),
                      lambda t: utils.softmax(t, by)):
        expected = operation(x.double())
        with emulated.on():
            got = operation(x)
        assert got.dtype == torch.bfloat16 and torch.allclose(got.double(), expected, atol=2e-2)


def test_results_changed_in_place(route):
    x, by = torch.randn(ROWS, 6, device=route.device), index().to(route.device)
    for reduce in ("sum", "mean"):  # extrema are kept for their gradient, by the host too
        leaf = x.clone().requires_grad_()
        with route.on():
            utils.scatter(leaf, by, reduce=reduce).add_(1).relu_().sum().backward()
        assert leaf.grad is not None


def test_a_softmax_changed_in_place(route):
    """As users mask it, or drop some of it. The host keeps nothing of the result."""
    x, by = torch.randn(ROWS, 6, device=route.device), index().to(route.device)

    def found():
        leaf = x.clone().requires_grad_()
        alpha = utils.softmax(leaf, by)
        alpha[::3] = 0.0
        alpha.mul_(2.0).square().sum().backward()
        return alpha, leaf.grad

    expected = found()
    with route.on():
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found(), expected))


# ---- what stays native ----

@pytest.mark.long
def test_native_calls(emulated):
    """To the last bit, errors too, each with its reason."""
    x, by = torch.randn(ROWS, 4), index()
    calls = [("GA206", lambda: utils.scatter(x, by[:4], dim=1)),
             ("GA208", lambda: utils.scatter(x, by, reduce="mul")),
             ("GA303", lambda: utils.scatter(x[:0], by[:0], dim_size=3)),
             ("GA208", lambda: utils.softmax(x, ptr=offsets(by))),
             ("GA208",
              lambda: utils.segment(x.clone().requires_grad_(), offsets(by), reduce="max")),
             ("GA203", lambda: utils.scatter(x.double(), by))]
    expected = [call() for _, call in calls]
    for (code, call), value in zip(calls, expected):
        gnnaccel.reset_stats()
        with gnnaccel.enabled(backend="cuda", when="supported"):
            assert torch.equal(call(), value)
        (entry,) = gnnaccel.stats().values()
        assert entry["reasons"] == {code: 1}
    with emulated.on(on_fallback="native"):
        for bad in (lambda: utils.scatter(x, by, dim=5), lambda: utils.scatter(x, by.view(2, -1)),
                    lambda: utils.scatter(x, by, reduce="median")):
            with pytest.raises(ValueError):
                bad()
        assert torch.equal(utils.scatter(by, by), NATIVE["scatter"](by, by))  # whole numbers


@pytest.mark.long
def test_on_a_cpu():
    x, by = torch.randn(ROWS, 4), index()
    expected = global_mean_pool(x, by)
    with gnnaccel.enabled(on_fallback="raise"):
        assert torch.equal(global_mean_pool(x, by), expected)
        assert torch.equal(torch.compile(global_mean_pool, backend="eager")(x, by), expected)
    assert gnnaccel.stats() == {"pyg.scatter": dict(calls=1, routes={"native": 1},
                                                    reasons={"GA401": 1})}


def test_the_number_of_groups_is_counted_anew_after_a_change():
    by = index()
    assert by_index.groups_in(by) == int(by.max()) + 1
    by[-1] = 20
    assert by_index.groups_in(by) == 21 and by_index.groups_in(by[:0]) == 0


def test_an_index_that_changes_has_another_structure(emulated):
    x, by = torch.randn(ROWS, 6), index()
    with emulated.on():
        utils.scatter(x, by)
        by.copy_(by.flip(0))
        got = utils.scatter(x, by)
    assert torch.allclose(got, NATIVE["scatter"](x, by), atol=1e-5)


def test_what_pays():
    """By size; small ones never, and a mean alone never: the host takes fewer passes for it."""
    small, large = torch.empty(2000, 64, device="meta"), torch.empty(2_000_000, 64, device="meta")
    for name in (*by_index.REDUCES, "softmax"):
        for grad in (False, True):
            assert aggregation_cost.by_index(small, name,
                                             grad).gain < aggregation_cost.by_index(large, name,
                                                                                    grad).gain
            assert (aggregation_cost.by_index(large, name, grad).gain
                    > 0) == ((name, grad) != ("mean", False))
    few = torch.empty(adapter._FEW, device="meta")
    assert all(aggregation_cost.by_index(few, name, grad).gain < 0 for name in by_index.REDUCES
               for grad in (False, True))


@pytest.mark.long
@pytest.mark.parametrize("groups", [GROUPS, None])
def test_a_softmax_that_gains_nothing_is_not_read(emulated, monkeypatch, groups):
    """Small ones never gain; large ones without gradients do once their index has come often enough
    for a structure. Groups that are not stated are counted once."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    read = []
    monkeypatch.setattr(adapter, "_softmax_reason",
                        lambda *args: read.append(args) or reason("GA208", "read"))

    counted, count = [], by_index._count
    monkeypatch.setattr(by_index, "_count", lambda index: counted.append(index) or count(index))

    def asked(x, by):
        del read[:]
        assert torch.equal(utils.softmax(x, by, None, groups), NATIVE["softmax"](x, by, None, groups))
        return bool(read)

    x = torch.randn(ROWS, 4)
    with emulated.on(when="profitable", on_fallback="native"):
        by = index()
        counted.clear()
        assert not any(asked(x.clone().requires_grad_(), by) for _ in range(20))
        assert gnnaccel.stats()["pyg.softmax"]["reasons"] == {"GA301": 20}
        assert len(counted) == (groups is None)
        assert not any(asked(x, by) for _ in range(20))
        many, by = torch.randn(500_000, 4), index(500_000)
        assert not asked(many, by) and any(asked(many, by) for _ in range(20))
        assert not asked(many, index(500_000))
        large = torch.empty(1 << 22, 8, device="meta")
        assert not by_index.softmax_unpaid(large, by, config.current())
    with emulated.on(on_fallback="native"):
        assert asked(x, index())


# ---- names ----

def bound():
    """Everything in modules of PyG that goes by these names, or stands in their place."""
    return {(m, n): v for m, module in list(sys.modules.items()) if m.startswith("torch_geometric.")
            and module is not None
            for n, v in list(vars(module).items()) if getattr(v, "__name__", None) in NATIVE
            and callable(v)}


def test_every_name_is_replaced_and_restored():
    before = bound()
    gnnaccel.enable()
    after = bound()
    changed = {key for key in before if after[key] is not before[key]}
    gnnaccel.disable()
    assert {("torch_geometric.utils", n)
            for n in NATIVE} | {("torch_geometric.nn.pool.glob", "scatter"),
            ("torch_geometric.nn.norm.graph_norm", "scatter"),
                                ("torch_geometric.nn.models.attentive_fp", "softmax")} <= changed
    assert not any(m.startswith(adapter._LAYERS) for m, _ in changed)
    assert all(value is before[key]
               for key, value in bound().items()) and bound().keys() == before.keys()


def test_pickles():
    """Of names imported before and while gnnaccel is enabled. Both are the host's without it."""
    with gnnaccel.enabled():
        made = [f for name in NATIVE for f in (NATIVE[name], getattr(utils, name))]
        assert list(map(pickle.loads, map(pickle.dumps, made))) == made
        texts = list(map(pickle.dumps, made))
    assert list(map(pickle.loads, texts)) == [f for f in NATIVE.values() for _ in range(2)]


def test_scripting():
    with gnnaccel.enabled():
        scripted = torch.jit.script(utils.softmax)
    x, by = torch.randn(ROWS), index()
    assert torch.equal(scripted(x, by), NATIVE["softmax"](x, by))


def test_readouts(route):
    """Aggregation modules by an index of their own; those of a layer are the layer's."""
    x, batch = torch.randn(ROWS, 6, device=route.device), index().to(route.device)
    for module, calls in ((nn.MeanAggregation(), 1), (nn.SoftmaxAggregation(learn=True), 2),
                          (nn.AttentionalAggregation(nn.MLP([6, 1])), 2)):
        module.to(route.device)
        expected = module(x, batch)
        gnnaccel.reset_stats()
        with route.on():
            assert torch.allclose(module(x, batch), expected, atol=1e-5)
        took(route, calls)
    layer, edges = (nn.EdgeConv(torch.nn.Linear(12, 4)).to(route.device),
                    torch.randint(0, ROWS, (2, 30), device=route.device))
    gnnaccel.reset_stats()
    with route.on(on_fallback="native"):
        layer(x, edges)
    assert list(gnnaccel.stats()) == ["EdgeConv"]


def test_inside_models(route):
    """Where PyG's own modules call these functions."""
    norm, x, batch = nn.GraphNorm(6), torch.randn(ROWS, 6), index()
    norm.to(route.device)
    expected = norm(x.to(route.device), batch.to(route.device), GROUPS)
    with route.on():
        got = norm(x.to(route.device), batch.to(route.device), GROUPS)
    assert torch.allclose(got, expected,
                          atol=1e-5) and gnnaccel.stats()["pyg.scatter"]["routes"] == {
                              route.backend: 2}


# ---- what only a GPU can show ----

@pytest.mark.gpu
def test_no_waiting_over_one_index(gpu):
    """Neither by kernels nor natively, though the host counts the groups in every call."""
    x, batch = torch.randn(5000, 16,
                           device=gpu.device).requires_grad_(), index(5000, 500).to(gpu.device)

    def step():
        for pool in (global_add_pool, global_mean_pool, global_max_pool):
            pool(x, batch).sum().backward()
        utils.softmax(x, batch).sum().backward()

    for options in (dict(when="supported"), dict(when="profitable")):
        with gpu.on(**options), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                step()
            with no_waiting():
                step()
    found = gnnaccel.stats()["pyg.scatter"]
    assert found["routes"] == {"cuda": 12, "native": 12} and found["reasons"] == {"GA301": 12}


@pytest.mark.gpu
def test_a_large_index_that_comes_again(gpu):
    x = torch.randn(2_000_000, 64, device=gpu.device)
    batch = torch.arange(20000, device=gpu.device).repeat_interleave(100)
    expected = global_max_pool(x, batch)
    with gnnaccel.enabled():
        for _ in range(6):
            got = global_max_pool(x, batch)
    assert torch.allclose(got, expected,
                          atol=1e-5) and gnnaccel.stats()["pyg.scatter"]["routes"]["cuda"] >= 3
    fresh = [torch.arange(200, device=gpu.device).repeat_interleave(25) for _ in range(5)]
    gnnaccel.reset_stats()
    with gnnaccel.enabled():
        for batch in fresh:
            global_mean_pool(x[:5000], batch, 200)
    assert gnnaccel.stats()["pyg.scatter"]["routes"] == {"native": 5}
