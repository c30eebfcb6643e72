"""Products of tall matrices."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from gnnaccel.cuda.messages import mlp
from gnnaccel.cuda.segment import segment_gemm
from gnnaccel.cuda.segment.segment_plan import Segments
from gnnaccel.dispatch.run import skinny_matmul
from tests.helpers import assert_accurate, relative
from tests.pyg import graphs
from tests.pyg.judge import compare
from tests.routes import emulated, gpu, one_thread, route  # noqa: F401


@pytest.fixture
def always(monkeypatch):
    """Every product that the kernel can make counts as tall; gives the sizes of those that it
    made, and of two at once."""
    made = []
    product = skinny_matmul._product
    monkeypatch.setattr(skinny_matmul, "TALL", 1)

    def watched(segments, x, *more):
        made.append(tuple(x.shape))
        return product(segments, x, *more)

    monkeypatch.setattr(skinny_matmul, "_product", watched)
    forward = mlp.forward

    def both(rows, x, w1, *more):
        made.append((*x.shape, len(w1)))
        return forward(rows, x, w1, *more)

    monkeypatch.setattr(mlp, "forward", both)
    return made


@pytest.mark.parametrize("k,n", [(64, 64), (16, 8), (128, 40), (8, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(device, always, k, n, bias):
    x, w = torch.randn(77, k).to(device), torch.randn(n, k).to(device)
    b = torch.randn(n).to(device) if bias else None
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert_accurate("linear", skinny_matmul.linear(x, w, b), F.linear(x, w, b), exact)
    y = torch.randn(77, n).to(device)
    assert_accurate("matmul", skinny_matmul.matmul(y, w), y @ w, y.double() @ w.double())
    assert len(always) == 1 + (n % 8 == 0 and k % 8 == 0)


def _by_backend(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def _allowed(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


@pytest.mark.parametrize("set_to,tf32,fp32",
                         [(torch.set_float32_matmul_precision, ("high", "medium"), ("highest",)),
                          (_allowed, (True,), (False,)), (_by_backend, ("tf32",), ("ieee",))],
                         ids=["by name", "allowed", "by backend"])
def test_precision_is_as_torch_has_it(device, set_to, tf32, fp32):
    if set_to is _by_backend and not hasattr(torch._C, "_get_fp32_precision_getter"):
        pytest.skip("this version of torch has no such setting")
    x, w = torch.randn(64, 64).to(device), torch.randn(64, 64).to(device)
    segments = Segments(torch.tensor([0, 64], dtype=torch.int32, device=device), 64)
    exact = x.double() @ w.double()
    try:
        for value in (*tf32, *fp32):
            set_to(value)
            found = segment_gemm.multiply(segments, x, w.unsqueeze(0), precision=skinny_matmul.precision())
            assert (relative(found, exact) > 1e-5) is (value in tf32), value
    finally:
        set_to(fp32[0])


@pytest.mark.parametrize("x,w", [((5, 7), (8, 7)), ((5, 256), (8, 256)), ((0, 64), (64, 64))])
def test_what_is_left_to_torch(device, always, x, w):
    x, w = torch.randn(x).to(device), torch.randn(w).to(device)
    assert torch.equal(skinny_matmul.linear(x, w, None), F.linear(x, w))
    half = torch.randn(5, 64).to(device,
                                 torch.bfloat16), torch.randn(64, 64).to(device, torch.bfloat16)
    assert torch.equal(skinny_matmul.linear(*half, None), F.linear(*half))
    apart = torch.randn(64, 5).to(device).t(), torch.randn(64, 64).to(device)
    assert torch.equal(skinny_matmul.linear(*apart, None), F.linear(*apart))
    assert not always


@pytest.mark.long
@pytest.mark.parametrize("cls,options",
                         [(GATConv, dict(heads=2)), (GATv2Conv, dict(heads=2)),
                          (TransformerConv, dict())])
def test_layers(route, always, cls, options):
    compare(route, cls(16, 16, **options), graphs.features(width=16), graphs.square())
    assert bool(always) is (route.backend == "cuda")


# --- with gradients -------------------------------------------------------------------------------

def result_and_gradients(function, given, grad, twice: bool = False) -> list[torch.Tensor]:
    """The result on the tensors ``given``, and the gradients of those that want one; ``twice``:
    those of the sums of squares of these gradients."""
    inputs = [t for t in given if t is not None and t.requires_grad]
    out = function(*given)
    grad = grad.detach().requires_grad_(twice)
    found = torch.autograd.grad(out, inputs, grad, create_graph=twice)
    if twice:
        found = torch.autograd.grad([one.square().sum() for one in found], [*inputs, grad],
                                    allow_unused=True)
    return [out, *[one for one in found if one is not None]]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("wanted", ["xwb", "xw", "wb", "w", "x", "b", "xb"])
@pytest.mark.parametrize("k,n", [(64, 64), (16, 64), (8, 16)])
def test_gradients(device, always, k, n, wanted, twice):
    x, w, b, grad = (torch.randn(shape).to(device) for shape in ((77, k), (n, k), (n,), (77, n)))
    b = None if wanted == "xw" else b
    given = [None if t is None else t.requires_grad_(name in wanted)
             for t, name in zip((x, w, b), "xwb")]
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad)
            for t in given]
    exact = result_and_gradients(F.linear, wide, grad.double(), twice)
    host = result_and_gradients(F.linear, given, grad, twice)
    ours = result_and_gradients(skinny_matmul.mapped, given, grad, twice)
    assert always and len(ours) == len(host) == len(exact)
    for at, (a, h, e) in enumerate(zip(ours, host, exact)):
        assert_accurate(f"{wanted} {at}", a, h, e)


def test_maps_that_are_left_to_torch(device, always):
    """Few rows, other types, autocast, rows of several dimensions, at addresses that no kernel is
    compiled for."""
    w = torch.randn(64, 64).to(device).requires_grad_()
    memory = torch.randn(65 * 64 + 1).to(device)
    for x in (torch.randn(3, 5, 64).to(device), memory[1:].view(65, 64)):
        assert torch.equal(skinny_matmul.mapped(x, w), F.linear(x, w))
    x = torch.randn(65, 64).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert skinny_matmul.mapped(x, w).dtype is torch.bfloat16
    assert torch.equal(skinny_matmul.mapped(x.double(), w.double()),
                       F.linear(x.double(), w.double()))
    assert not always


@pytest.mark.parametrize("cls", [TransformerConv, GATv2Conv])
def test_maps_of_edges(route, always, cls):
    compare(route, cls(16, 16, edge_dim=8), graphs.features(width=16), graphs.square(),
            graphs.edge_features(graphs.E, 8), positions=("x", "edge_index", "edge_attr"))
    of_edges = [rows for rows, k in always if k == 8]  # with self loops, or without
    assert bool(of_edges) is (route.backend == "cuda")
    assert all(rows >= graphs.E for rows in of_edges)


class Filter(MessagePassing):
    """SchNet's: the neighbour's rows times a network of the edge's; ``both`` ends are in it too."""

    def __init__(self, both: bool = False, act: nn.Module | None = None, hidden: int = 64):
        super().__init__(aggr="add")
        self.net = nn.Sequential(nn.Linear(16 * (3 if both else 1), hidden), act or nn.SiLU(),
                                 nn.Linear(hidden, 16))
        self.both = both

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        if self.both:
            edge_attr = torch.cat([x_i, x_j, edge_attr], -1)
        return x_j * self.net(edge_attr)


@pytest.mark.long
@pytest.mark.parametrize("both", [False, True])
def test_networks_of_edges(route, always, both):
    if route.backend != "cuda":
        pytest.skip("messages are generated for kernels")
    compare(route, Filter(both), graphs.features(width=16), graphs.square(),
            graphs.edge_features(graphs.E, 16), positions=("x", "edge_index", "edge_attr"))
    assert ((graphs.E, 64) if both else (graphs.E, 16, 64)) in always


class Shifted(nn.Module):
    """PyG's own for SchNet."""

    def forward(self, x):
        return F.softplus(x) - 0.6931471805599453


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.ELU(0.5),
                                 nn.LeakyReLU(0.3), nn.Softplus(2.0), nn.Sigmoid(), Shifted()],
                         ids=str)
def test_functions_between_maps_of_edges(route, always, act):
    if route.backend != "cuda":
        pytest.skip("messages are generated for kernels")
    compare(route, Filter(act=act), graphs.features(width=16), graphs.square(),
            graphs.edge_features(graphs.E, 16), positions=("x", "edge_index", "edge_attr"))
    assert (graphs.E, 16, 64) in always


@pytest.mark.long
@pytest.mark.parametrize("act,hidden", [(nn.Softmax(-1), 64), (nn.PReLU(), 64), (nn.SiLU(), 128),
                                        (nn.SiLU(), 24), (nn.Sequential(*[nn.Tanh()] * 6), 64)],
                         ids=str)
def test_what_is_no_function_of_each_number_or_too_wide(route, always, act, hidden):
    if route.backend != "cuda":
        pytest.skip("messages are generated for kernels")
    compare(route, Filter(act=act, hidden=hidden), graphs.features(width=16), graphs.square(),
            graphs.edge_features(graphs.E, 16), positions=("x", "edge_index", "edge_attr"))
    assert (graphs.E, 16, hidden) not in always


class ByHead(MessagePassing):
    """A network of the edge's features whose second map is one of each head."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x.view(-1, 2, 16), edge_attr=edge_attr).flatten(1)

    def message(self, x_j, edge_attr):
        return x_j * self.second(F.silu(self.first(edge_attr).view(-1, 2, 32)))


def test_maps_of_heads(route, always):
    if route.backend != "cuda":
        pytest.skip("messages are generated for kernels")
    compare(route, ByHead(), graphs.features(width=32), graphs.square(),
            graphs.edge_features(graphs.E, 16), positions=("x", "edge_index", "edge_attr"))


class OfBothEnds(MessagePassing):
    """A map of both ends side by side, which is made of nodes by two parts of its weight."""

    def __init__(self):
        super().__init__(aggr="add")
        self.map = nn.Linear(32, 16)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x.tanh())

    def message(self, x_i, x_j):
        return self.map(torch.cat([x_i, x_j], -1)).relu()


def test_parts_of_weights_in_checkpoints(route, always):
    """Both runs make the map in one way, with or without copies of what may be written to."""
    if route.backend != "cuda":
        pytest.skip("messages are generated for kernels")
    x, edge_index, layer = graphs.features(width=16), graphs.square(), OfBothEnds()
    x, edge_index, layer = route.put(x, edge_index, layer)
    x.requires_grad_()
    exact, = torch.autograd.grad(layer(x, edge_index).square().sum(), x)
    with route.on():
        for _ in range(4):
            found, = torch.autograd.grad(layer(x, edge_index).square().sum(), x)
            assert relative(found, exact) < 1e-5
            repeated = checkpoint(layer, x, edge_index, use_reentrant=False)
            found, = torch.autograd.grad(repeated.square().sum(), x)
            assert relative(found, exact) < 1e-5
    assert always
