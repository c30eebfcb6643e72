"""On a GPU the stand-ins give what they give on the CPU."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.adapters.standins.cluster import grouping, neighbours, walks
from gnnaccel.adapters.standins.scatter import composite, segment
from gnnaccel.adapters.standins.scatter import reduce as scatters
from gnnaccel.adapters.standins.sparse import joining
from gnnaccel.adapters.standins.sparse.tensor import SparseTensor

pytestmark = pytest.mark.gpu


def on_both(function, *tensors):
    """Results and gradients of the first tensor."""
    found = []
    for device in ("cpu", "cuda"):
        given = [tensor.to(device) for tensor in tensors]
        if given[0].is_floating_point():
            given[0] = given[0].detach().requires_grad_()
        out = function(*given)
        outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
        assert all(each.device.type == device for each in outs)
        if outs[0].requires_grad:
            outs += torch.autograd.grad(outs[0].square().sum(), given[0])
        found.append([each.detach().cpu() for each in outs])
    for cpu, gpu in zip(*found):
        torch.testing.assert_close(gpu, cpu)


@pytest.fixture
def grouped():
    torch.manual_seed(0)
    return torch.randn(500, 6, dtype=torch.float64), torch.randint(0, 40, (500,)).sort()[0]


@pytest.mark.parametrize("reduce", scatters.REDUCES)
def test_scatter(grouped, reduce):
    function = getattr(scatters, f"scatter_{reduce}")
    on_both(lambda src, index: function(src, index, 0, dim_size=45), *grouped)
    on_both(lambda src, index: function(src, index, 0), grouped[0].long(), grouped[1])


@pytest.mark.parametrize("reduce", segment.REDUCES)
def test_segments(grouped, reduce):
    src, index = grouped
    on_both(lambda src, index: segment.segment_coo(src, index, reduce=reduce), src, index)
    on_both(lambda src, ptr: segment.segment_csr(src, ptr, reduce=reduce), src,
            torch.searchsorted(index, torch.arange(41)))


@pytest.mark.parametrize("name", ["scatter_softmax", "scatter_log_softmax", "scatter_logsumexp",
                                  "scatter_std"])
def test_composite(grouped, name):
    on_both(lambda src, index: getattr(composite, name)(src, index, 0), *grouped)


METHODS = {
    "t": lambda adj: adj.t(), "sum": lambda adj: adj.sum(1), "max": lambda adj: adj.max(0),
    "symmetric": lambda adj: adj.to_symmetric(), "diagonal": lambda adj: adj.fill_diag(2.0),
    "rows": lambda adj: adj[torch.tensor([4, 2])], "columns": lambda adj: adj[:, [4, 2]],
    "mask": lambda adj: adj[:, torch.arange(30) % 2 == 0], "narrow": lambda adj: adj[3:9, 5:],
    "times": lambda adj: adj * adj.sum(1).view(-1, 1), "plus": lambda adj: adj + adj.t(),
    "product": lambda adj: adj @ adj, "cat": lambda adj: joining.cat([adj, adj], (0, 1)),
    "dense": lambda adj: adj.to_dense(), "subgraph": lambda adj: adj.saint_subgraph(
        torch.arange(9, device=adj.device()))[0],
    "eye": lambda adj: SparseTensor.eye(4, device=adj.device()),
    "neighbours": lambda adj: adj.sample_adj(torch.arange(9, device=adj.device()), -1)[0],
}


@pytest.mark.parametrize("name", METHODS)
def test_sparse(name):
    torch.manual_seed(0)
    row, col = torch.randint(0, 30, (2, 200)).unique(dim=1)

    def function(value, row, col):
        out = METHODS[name](SparseTensor(row=row, col=col, value=value, sparse_sizes=(30, 30)))
        if not isinstance(out, SparseTensor):
            return out
        row, col, value = out.coo()
        return value, row, col

    on_both(function, torch.randn(len(row), dtype=torch.float64), row, col)


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products(reduce, dtype):
    torch.manual_seed(0)
    row, col = torch.randint(0, 30, (2, 200)).unique(dim=1)

    def function(x, value, row, col):
        adj = SparseTensor(row=row, col=col, value=value, sparse_sizes=(30, 30))
        return adj.matmul(x, reduce)

    on_both(function, torch.randn(30, 8, dtype=dtype), torch.randn(len(row), dtype=dtype), row, col)


def test_searches():
    torch.manual_seed(0)
    x, batch = torch.rand(3000, 3, dtype=torch.float64), torch.randint(0, 7, (3000,)).sort()[0]
    on_both(lambda b, x: neighbours.knn_graph(x, 8, b), batch, x)
    on_both(lambda b, x: neighbours.radius_graph(x, 0.1, b), batch, x)
    on_both(lambda b, x: neighbours.nearest(x, x[::3], b, b[::3]), batch, x)
    on_both(lambda b, x: grouping.fps(x, b, 0.1, random_start=False), batch, x)
    on_both(lambda b, x: grouping.grid_cluster(x, torch.full((3,), 0.2, device=x.device)), batch, x)


def test_walks():
    row = torch.arange(50, device="cuda").repeat_interleave(3)
    col = (row + torch.tensor([1, 2, 3], device="cuda").repeat(50)) % 50
    for p, q in ((1, 1), (0.5, 2)):
        walk = walks.random_walk(row, col, torch.arange(50, device="cuda"), 9, p, q)
        steps = (walk.diff(dim=1)) % 50
        assert walk.is_cuda and int(steps.min()) >= 1 and int(steps.max()) <= 3
    cluster = grouping.graclus_cluster(row, col)
    assert cluster.is_cuda and int(torch.bincount(cluster).max()) <= 2
