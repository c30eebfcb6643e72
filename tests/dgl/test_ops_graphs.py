"""Operations over graphs of every shape: no edges, nodes without edges, hubs, duplicates, self
loops, one node; and graphs that are gone before backward."""
from __future__ import annotations

import gc

import dgl
import dgl.function as fn
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gnnaccel
from tests.dgl import graphs
from tests.dgl.judge import close
from tests.dgl.op_cases import finite
from tests.helpers import relative

SHAPES = [((), ()), ((3,), (1,)), ((2, 3), (2, 1)), ((2, 1), (2, 3)), ((3,), ())]
NAMES = [*(f"u_{op}_e_{reduce}" for op in ("add", "sub", "mul", "div")
           for reduce in ("sum", "max", "min", "mean")),
         *(f"copy_{t}_{reduce}" for t in "ue" for reduce in ("sum", "max", "min", "mean")),
         *(f"{a}_{op}_{b}" for op in ("add", "mul", "div") for a, b in ("uv", "vu", "ue", "ev")),
         "u_dot_v", "copy_u", "copy_v", "edge_softmax"]
usual = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw, shapes=tuple(SHAPES), names=tuple(NAMES)):
    """(graph, name, features in fp64)."""
    src, dst, edges = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(0, 14))
    hub = draw(st.booleans())
    ends = [(draw(st.integers(0, src - 1)), 0 if hub else draw(st.integers(0, dst - 1)))
            for _ in range(edges)]
    idtype = draw(st.sampled_from([torch.int32, torch.int64]))
    u, v = (torch.tensor([end[i] for end in ends], dtype=idtype) for i in (0, 1))
    square = draw(st.booleans())
    if square:
        g = dgl.graph((u, v), num_nodes=max(src, dst), idtype=idtype)
    else:
        g = dgl.heterograph({("a", "r", "b"): (u, v)}, num_nodes_dict=dict(a=src, b=dst),
                            idtype=idtype)
    name, (first, second) = draw(st.sampled_from(names)), draw(st.sampled_from(shapes))
    torch.manual_seed(draw(st.integers(0, 99)))
    rows = dict(u=g.num_src_nodes(), v=g.num_dst_nodes(), e=edges)
    if name == "edge_softmax" or name.startswith("copy"):
        targets = "e" if name == "edge_softmax" else name[5]
        return g, name, [torch.randn(rows[targets], *first, dtype=torch.float64)]
    second = first if "dot" in name else second
    return g, name, [torch.randn(rows[t], *shape, dtype=torch.float64)
                     for t, shape in zip((name[0], name[6] if name.count("_") == 3 else name[-1]),
                                         (first, second))]


def results(g, name, feats, backward: bool) -> list[torch.Tensor]:
    leaves = [f.detach().requires_grad_() for f in feats]
    out = finite(getattr(dgl.ops, name)(g, *leaves))
    if not backward:
        return [out.detach()]
    torch.manual_seed(5)
    return [out.detach(),
            *torch.autograd.grad((out * torch.randn(out.shape, dtype=torch.float64).to(out)).sum(),
                                 leaves)]


def compared(case, dtype, tolerance: float, **options) -> None:
    g, name, feats = case
    # where DGL's own fails
    backward = g.num_edges() > 0 or name.rpartition("_")[2] not in ("max", "min")
    expected = results(g, name, feats, backward)
    with gnnaccel.enabled(when="supported", on_fallback="raise", **options):
        got = results(g, name, [f.to(dtype) for f in feats], backward)
    for a, b in zip(got, expected):
        assert a.shape == b.shape and relative(a, b) < tolerance, name
    assert {r for entry in gnnaccel.stats().values() for r in entry["routes"]} <= {"torch", "cuda"}


@pytest.mark.long
@usual
@given(cases())
def test_torch_operations(case):
    compared(case, torch.float64, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("names", [NAMES[:24], NAMES[24:]], ids=["reduced to nodes", "on edges"])
def test_kernels(emulated, names):
    """Few shapes, as each is compiled."""
    @settings(usual, max_examples=60)
    @given(cases(shapes=(SHAPES[2], SHAPES[4]), names=tuple(names)))
    def held(case):
        compared(case, torch.float32, 1e-4, backend="auto")

    held()


@pytest.mark.long
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("message", ["copied", "weighted"])
@pytest.mark.parametrize("ids", [True, False])
def test_gradients_of_sums_after_the_graph_is_gone(route, message, ids, degree):
    """Of the host's CSC, with and without ids, what forward did not read is not there."""
    indptr, src, eid = (t.to(route.device) for t in graphs.square().adj_tensors("csc"))
    x, w = graphs.features().to(route.device), torch.rand(len(src), 1, device=route.device)

    def gradients():
        left = [x.clone().requires_grad_(), w.clone().requires_grad_()][:1 + (message != "copied")]
        g = dgl.graph(("csc", (indptr, src, eid if ids else eid[:0])), num_nodes=graphs.N)
        g.ndata["h"] = left[0]
        g.edata["w"] = left[-1] if message == "weighted" else w
        g.update_all(fn.u_mul_e("h", "w", "m") if message == "weighted" else fn.copy_u("h", "m"),
                     fn.sum("m", "y"))
        found = g.ndata["y"].pow(3).sum()
        del g
        gc.collect()
        for _ in range(degree):
            grads = torch.autograd.grad(found, left, create_graph=degree > 1)
            found = sum(grad.pow(2).sum() for grad in grads)
        return grads

    truth = gradients()
    with route.on():
        assert all(map(close, gradients(), truth))
