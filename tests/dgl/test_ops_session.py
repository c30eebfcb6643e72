"""enable() to disable() for single operations: names, counts, records, options, places where they
stay native."""
from __future__ import annotations

import sys

import dgl
import pytest
import torch
from dgl.backend.pytorch import sparse
from dgl.ops import copy_u_sum, edge_softmax, u_mul_e_sum  # by a user, before enable()
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.adapters.dgl.ops import replaced
from gnnaccel.dispatch.observe import records
from tests.dgl import graphs, op_cases
from tests.dgl.graphs import E, N
from tests.dgl.judge import close, took
from tests.helpers import relative


def bound() -> dict[tuple[str, str], object]:
    """Everything in modules of DGL that is one of the operations, or stands in its place."""
    names = {n for n in vars(sparse) if callable(getattr(sparse, n))}
    return {(m, n): v for m, module in list(sys.modules.items()) if m.split(".")[0] == "dgl"
            and module is not None
            for n, v in list(vars(module).items()) if getattr(v, "__name__", None) in names
            and callable(v)}


@pytest.fixture
def inputs(route):
    g = graphs.square().to(route.device)
    return g, torch.randn(N, 2, 4, device=route.device), torch.randn(E, 2, 1, device=route.device)


def test_every_name_is_replaced_and_restored():
    originals = {getattr(sparse, n) for n in replaced.ROUTED}
    before = bound()
    held = {key for key, v in before.items() if v in originals and key[0] != sparse.__name__}
    assert ("dgl.ops.spmm", "gspmm_internal") in held and ("dgl.ops.edge_softmax",
                                                           "edge_softmax_internal") in held
    for _ in range(2):
        gnnaccel.enable()
        after = bound()
        assert {key for key in before if after[key] is not before[key]} == held
        assert all(after[key].__wrapped__ is before[key] for key in held)
        gnnaccel.disable()
        assert all(value is before[key]
                   for key, value in bound().items()) and bound().keys() == before.keys()


def test_names_imported_before_are_routed(route, inputs):
    g, x, e = inputs
    expected = u_mul_e_sum(g, x, e), edge_softmax(g, e), copy_u_sum(g, x)
    with route.on():
        got = u_mul_e_sum(g, x, e), edge_softmax(g, e), copy_u_sum(g, x)
    took(route, 3)
    assert all(close(a, b) for a, b in zip(got, expected))
    assert {name: entry["calls"]
            for name, entry in gnnaccel.stats().items()} == {"dgl.gspmm": 2, "dgl.edge_softmax": 1}


# ---- the CPU ----

def test_native_on_the_cpu():
    """To the last bit, counted, and with nothing built for it."""
    g, x = graphs.square(), torch.randn(N, 4)
    expected = copy_u_sum(g, x)
    with gnnaccel.enabled():
        assert torch.equal(copy_u_sum(g, x), expected)
    assert gnnaccel.stats() == {"dgl.gspmm": dict(calls=1, routes={"native": 1},
                                                  reasons={"GA401": 1})}
    assert "gnnaccel" not in g._graph._cache


def test_native_on_the_cpu_is_no_fallback():
    g, x = graphs.square(), torch.randn(N, 4)
    with gnnaccel.enabled(on_fallback="raise"):
        copy_u_sum(g, x)
    with gnnaccel.enabled(records=5):
        copy_u_sum(g, x)
    (record,) = gnnaccel.records()
    records.validate(record)
    assert (record["route"],
            [r["code"] for r in record["rejected"]]) == ("native", ["GA401", "GA301"])


def test_inside_layers_operations_are_the_layers():
    """What a layer that is native computes is the host's to the last bit, and counted as one
    call."""
    g, x = graphs.square(), graphs.features()
    layer = dgl.nn.GATConv(graphs.F, 8, 2)
    expected = layer(g, x, get_attention=True)
    with gnnaccel.enabled(when="supported"):
        got = layer(g, x, get_attention=True)
    assert all(map(torch.equal, got, expected)) and set(gnnaccel.stats()) == {"GATConv"}


def test_functions_of_the_users_that_cannot_be_followed_run_natively(inputs_on_cpu):
    g, x = inputs_on_cpu
    g.ndata["x"] = x
    with gnnaccel.enabled(when="supported", records=9):
        g.update_all(lambda edges: {"m": edges.src["x"] * len(edges) / len(edges)},
                     lambda nodes: {"y": nodes.mailbox["m"].sum(1) * len(nodes) / len(nodes)})
        g.apply_edges(lambda edges: {"s": edges.src["x"] * len(edges) / len(edges)})
    assert gnnaccel.stats() == {"dgl.message_udf": dict(calls=2, routes={"native": 2},
                                                        reasons={"GA211": 2}),
                                "dgl.reduce_udf": dict(calls=1, routes={"native": 1},
                                                       reasons={"GA211": 1})}
    assert close(g.ndata["y"], copy_u_sum(g, x))
    for record in gnnaccel.records():
        records.validate(record)
    with gnnaccel.enabled(when="supported", on_fallback="raise"), pytest.raises(
        gnnaccel.errors.FallbackError, match="GA211"):
        g.apply_edges(lambda edges: {"s": edges.src["x"] * len(edges)})


# ---- the options ----

def test_blocks_in_which_it_is_off(inputs, route):
    g, x, _ = inputs
    with route.on():
        copy_u_sum(g, x)
        with gnnaccel.disabled():
            copy_u_sum(g, x)
    took(route, 1)


def test_records(route, inputs):
    g, x, e = inputs
    with route.on(records=10):
        for _ in range(2):
            u_mul_e_sum(g, x.requires_grad_(), e).sum().backward()
    forward, backward, again, _ = gnnaccel.records()
    for record in gnnaccel.records():
        records.validate(record)
    assert (forward["layer"], forward["host"],
            forward["route"]) == ("dgl.gspmm", "dgl", route.backend)
    assert forward["graph"] == dict(num_src=N, num_dst=N,
                                    num_edges=E) and forward["dtype"] == "float32"
    assert (backward["direction"], backward["forward_call"]) == ("backward", forward["call"])
    if route.backend == "cuda":
        assert (forward["cache"], again["cache"],
                forward["kernel"]) == ("miss", "hit", "fused weighted sum")


@pytest.mark.long
def test_what_is_not_understood_raises_the_hosts_own_error(route, inputs):
    g, x, e = inputs
    for wrong in (lambda: copy_u_sum(g, x[1:]), lambda: u_mul_e_sum(g, x, e.double()),
                  lambda: copy_u_sum(g, x.long()),
                  lambda: u_mul_e_sum(g, x, torch.randn(E, 3, 3, device=x.device))):
        with route.on(on_fallback="native"), pytest.raises(dgl.DGLError):
            wrong()
        if route.device.type == "cpu":
            with route.on(), pytest.raises(gnnaccel.errors.FallbackError):
                wrong()


def test_a_backend_that_rules_the_kernels_out(emulated, inputs_on_cpu):
    g, x = inputs_on_cpu
    with emulated.on(backend="torch"):
        copy_u_sum(g, x)
    with emulated.on(backend="auto"):
        copy_u_sum(g, x.double())
    assert gnnaccel.stats()["dgl.gspmm"]["routes"] == {"torch": 2}


@pytest.fixture
def inputs_on_cpu():
    return graphs.square(), torch.randn(N, 4)


def test_kernels_that_do_not_compile(emulated, inputs_on_cpu, monkeypatch):
    from gnnaccel.cuda.runtime import driver
    from gnnaccel.dispatch.plan import compiling

    def refuse(*args):
        raise driver.CompileError("no such thing")

    monkeypatch.setattr(compiling, "_states", {})
    monkeypatch.setattr(type(driver.current()), "kernel", refuse)
    g, x = inputs_on_cpu
    with emulated.on(backend="auto", records=1):
        copy_u_sum(g, x[:, :3].contiguous())
    assert gnnaccel.records()[0]["rejected"][0]["code"] == "GA403" and gnnaccel.records()[0][
        "route"] == "torch"


def test_a_host_without_kernels_for_the_device(inputs_on_cpu, monkeypatch):
    """As with tensors on a GPU and a DGL built without CUDA: everything is ours, also where it is
    disabled."""
    from gnnaccel.adapters.dgl.ops.calls import relation
    from gnnaccel.dispatch.ops import calls, operands, route

    g, x = inputs_on_cpu
    expected = copy_u_sum(g, x)
    graph = relation(g._graph, x.device)
    call = calls.gspmm(graph, operands.prepare("copy_lhs", x, None), "sum")
    with gnnaccel.enabled(on_fallback="raise", records=5):
        from gnnaccel.dispatch.policy.config import current
        assert close(route.run("dgl.gspmm", call, None, current()), expected)
    assert gnnaccel.stats()["dgl.gspmm"]["routes"] == {"torch": 1} and gnnaccel.records()[0][
        "route"] == "torch"
    assert close(route.run("dgl.gspmm", call, None, None), expected)


# ---- dtypes and derivatives ----

@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(route, inputs, dtype):
    """DGL on a CPU has no float16, so this is held against its float64."""
    g, x, e = (t if isinstance(t, dgl.DGLGraph) else t.to(dtype) for t in inputs)
    names = ["u_mul_e_sum", "u_mul_e_max", "u_add_e_mean", "edge_softmax", "e_add_v"]
    calls = {n: (e,) if n == "edge_softmax" else (x, e) if n[0] == "u" else (e, x) for n in names}
    exact = {n: getattr(dgl.ops, n)(g.to("cpu"), *(t.double().cpu() for t in args))
             for n, args in calls.items()}
    with route.on(backend="auto"):
        got = {n: getattr(dgl.ops, n)(g, *args) for n, args in calls.items()}
    unit = {torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for n, value in got.items():
        assert value.dtype == dtype and relative(value.cpu(), exact[n]) < unit, n
    expected = "torch" if dtype == torch.float64 else route.backend
    assert {r for entry in gnnaccel.stats().values() for r in entry["routes"]} == {expected}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["copy_u_sum", "u_mul_e_sum", "u_add_v"])
def test_gradients_of_a_node_with_many_edges(name, dtype):
    """In halves one more of hundreds of edges no longer changes the sum, so it is made in fp32."""
    g = dgl.graph((torch.zeros(4096, dtype=torch.long), torch.ones(4096, dtype=torch.long))).int()
    x, e = torch.ones(2, 3, dtype=dtype, requires_grad=True), torch.ones(4096, 1, dtype=dtype)
    args = dict(copy_u_sum=(x,), u_mul_e_sum=(x, e), u_add_v=(x, x))[name]
    with gnnaccel.enabled(backend="torch", when="supported"):
        getattr(dgl.ops, name)(g, *args).sum().backward()
    assert x.grad[0].tolist() == [4096.0] * 3


DERIVED = ["copy_u_sum", "u_mul_e_sum", "copy_e_sum", "u_mul_e_max", "copy_u_min", "copy_e_max",
           "u_add_v", "u_mul_v", "u_dot_v", "edge_softmax", "copy_u", "e_mul_v"]


@pytest.mark.parametrize("name", DERIVED)
def test_second_derivatives(route, name):
    g = op_cases.bare().to(route.device)
    made = dict(u=torch.randn(N, 2, 3), v=torch.randn(N, 2, 3), e=torch.randn(E, 2, 1))
    targets = ("e" if name == "edge_softmax" else name[5]
               if name.startswith("copy") else name[0] + name[2:].split("_")[1])
    function = op_cases.Op(getattr(dgl.ops, name))

    def second(dtype):
        feats = [made[t].to(route.device, dtype).requires_grad_() for t in targets]
        torch.manual_seed(3)
        out = function(g, *feats)
        grads = torch.autograd.grad((out.pow(2) * torch.randn(out.shape).to(out)).sum(), feats,
                                    create_graph=True)
        return torch.autograd.grad(sum(d.pow(3).sum() for d in grads), feats)

    with gnnaccel.enabled(backend="torch", when="supported"):
        truth = second(torch.float64)
        feats = [made[t].to(route.device).double().requires_grad_() for t in targets]
        assert torch.autograd.gradgradcheck(lambda *feats: function(g, *feats), feats,
                                            fast_mode=True)
    gnnaccel.reset_stats()
    with route.on():
        got = second(torch.float32)
    took(route, 1)
    for a, b in zip(got, truth):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("name", DERIVED)
def test_checkpoints(route, name):
    """A checkpoint allows each saved tensor to be read once in backward."""
    g, function = op_cases.bare().to(route.device), op_cases.Op(getattr(dgl.ops, name))
    targets = ("e" if name == "edge_softmax" else name[5]
               if name.startswith("copy") else name[0] + name[2:].split("_")[1])
    made = [torch.randn(E if t == "e" else N, 2, 3) for t in targets]

    def gradients(call):
        feats = [t.to(route.device).requires_grad_() for t in made]
        return torch.autograd.grad(call(g, *feats).pow(2).sum(), feats)
    with route.on():
        plain = gradients(function)
        repeated = gradients(lambda *args: checkpoint(function, *args, use_reentrant=False))
    took(route, 3)  # the repetition is one
    assert all(relative(a, b) < 1e-6 for a, b in zip(repeated, plain))


SEGMENTED = {
    "sum": lambda x: dgl.ops.segment_reduce(torch.tensor([3, 0, 5, 2], device=x.device), x, "sum"),
    "max": lambda x: op_cases.finite(
        dgl.ops.segment_reduce(torch.tensor([3, 0, 5, 2], device=x.device), x, "max")),
    "segment_mm": lambda x: dgl.ops.segment_mm(x,
                                               x[:9].view(1, 9, 4).transpose(1, 2).expand(2, 4, 9),
                                               torch.tensor([6, 4])),
    "gather_mm": lambda x: dgl.backend.gather_mm(x, torch.stack([x[:4].repeat(1, 5)] * 2), None,
                                                 torch.arange(10, device=x.device) % 2),
}


@pytest.mark.parametrize("name", SEGMENTED)
def test_second_derivatives_by_segment(route, name):
    x = torch.randn(10, 4, dtype=torch.float64)

    def second(dtype):
        leaf = x.to(route.device, dtype).requires_grad_()
        (grad,) = torch.autograd.grad(SEGMENTED[name](leaf).pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.pow(3).sum(), leaf)[0]

    with gnnaccel.enabled(backend="torch", when="supported"):
        truth = second(torch.float64)
        assert torch.autograd.gradgradcheck(SEGMENTED[name], x.to(route.device).requires_grad_(),
                                            fast_mode=True)
    with route.on():
        assert relative(second(torch.float32), truth) < 1e-4


@pytest.mark.parametrize("name",
                         ["copy_u_sum", "u_mul_e_sum", "copy_e_sum", "copy_u_max", "edge_softmax",
                          "u_dot_v"])
def test_results_changed_in_place(route, inputs, name):
    """As users do with ``add_``. (What is differentiated through its own result may not be, as in
    any case.)"""
    g, x, e = inputs
    args = {"copy_e_sum": (e,), "edge_softmax": (e,), "u_mul_e_sum": (x, e),
            "u_dot_v": (x, x)}.get(name, (x,))
    leaves = [t.clone().requires_grad_() for t in args]
    with route.on():
        out = getattr(dgl.ops, name)(g, *leaves)
    out.add_(1.0)
    if name != "edge_softmax":
        out.sum().backward()
        assert all(t.grad is not None for t in leaves)


@pytest.mark.long
def test_gradients_of_some(route, inputs):
    g, x, e = inputs
    for name, args in (("u_mul_e_sum", (x, e)), ("u_mul_e_max", (x, e)), ("u_dot_v", (x, x)),
                       ("u_mul_v", (x, x))):
        for which in (0, 1):
            leaves = [t.clone().requires_grad_(i == which) for i, t in enumerate(args)]
            with route.on():
                getattr(dgl.ops, name)(g, *leaves).sum().backward()
            assert leaves[which].grad is not None and leaves[1 - which].grad is None


# ---- modes ----

@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(route, mode):
    g, x = graphs.square().to(route.device), torch.randn(N, 4, device=route.device)
    with mode():
        expected = copy_u_sum(g, x)
        with route.on():
            assert close(copy_u_sum(g, x), expected)
    with route.on():  # what was built inside is good for training
        copy_u_sum(g, x.clone().requires_grad_()).sum().backward()
    took(route, 2)


def test_deterministic_mode(route, inputs):
    g, x, e = inputs
    torch.use_deterministic_algorithms(True)
    try:
        with route.on(backend="auto"):
            for name in ("u_mul_e_sum", "u_mul_e_max", "u_add_e_min"):
                leaf = x.clone().requires_grad_()
                getattr(dgl.ops, name)(g, leaf, e).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
def test_compiled_regions(inputs_on_cpu):
    g, x = inputs_on_cpu
    expected = copy_u_sum(g, x).relu()
    with gnnaccel.enabled(when="supported"):
        assert close(torch.compile(lambda x: copy_u_sum(g, x).relu(), backend="eager")(x), expected)


def test_the_first_tensor_decides_whatever_its_class():
    from gnnaccel.adapters.dgl.ops.calls import first_tensor

    x = torch.nn.Parameter(torch.ones(2))
    assert first_tensor(("sum", [None, (x,)],
                         torch.ones(1))) is x and first_tensor((1, "u", [])) is None


def test_transforms_are_left_to_dgl(inputs_on_cpu):
    g, x = inputs_on_cpu
    with gnnaccel.enabled(when="supported"):
        with torch.autograd.forward_ad.dual_level():
            copy_u_sum(g, x)
    assert gnnaccel.stats()["dgl.gspmm"] == dict(calls=1, routes={"native": 1},
                                                 reasons={"GA405": 1})


def test_changed_graphs_are_seen(route):
    g, x = graphs.square().to(route.device), torch.randn(N, 4, device=route.device)
    with route.on():
        copy_u_sum(g, x)
        g.add_edges(torch.tensor([1], device=route.device), torch.tensor([2], device=route.device))
        got = copy_u_sum(g, x)
    assert close(got, copy_u_sum(g, x))
