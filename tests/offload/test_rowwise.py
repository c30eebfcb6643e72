"""What a model does between its layers, in bands of rows, and whole models."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnnaccel import offload
from gnnaccel.dispatch.offload import calls, rowwise
from gnnaccel.errors import OffloadError
from tests.distributed import graphs
from tests.offload import checks

NODES, WIDTH = 60, 6


@pytest.fixture(autouse=True)
def small_bands():
    with checks.small_bands():
        yield


@pytest.fixture
def ran(monkeypatch):
    """The names of the operations that ran in bands, and how many bands there were."""
    found = []
    forward = calls.Call.forward

    def counted(self, inputs, whole):
        found.append((self.name, len(self.bands.bands)))
        return forward(self, inputs, whole)

    monkeypatch.setattr(calls.Call, "forward", counted)
    return found


def both(function, *shapes):
    """(results and gradients in bands, those of the whole)."""
    def run():
        g = graphs.generator(0)
        given = [torch.randn(shape, generator=g).requires_grad_() for shape in shapes]
        out = function(*given)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        return [out.detach(), *(t.grad for t in given)]

    right = run()
    with offload(device="cpu"):
        found = run()
    return found, right


ROWS, WEIGHT, LINE = (NODES, WIDTH), (8, WIDTH), (WIDTH,)
CASES = {
    "linear": (F.linear, ROWS, WEIGHT, (8,)),
    "linear of three dimensions": (F.linear, (NODES, 3, WIDTH), WEIGHT),
    "matmul": (lambda x, w: x @ w.t(), ROWS, WEIGHT),
    "relu": (torch.relu, ROWS), "relu of a method": (lambda x: x.relu(), ROWS),
    "gelu": (F.gelu, ROWS), "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), ROWS),
    "elu": (F.elu, ROWS), "prelu": (F.prelu, ROWS, (1,)), "silu": (F.silu, ROWS),
    "sigmoid": (torch.sigmoid, ROWS), "tanh": (torch.tanh, ROWS), "softplus": (F.softplus, ROWS),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), ROWS), "neg": (lambda x: -x, ROWS),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), ROWS, LINE, LINE),
    "softmax": (lambda x: x.softmax(-1), ROWS),
    "log_softmax": (lambda x: F.log_softmax(x, dim=1), ROWS),
    "normalize": (lambda x: F.normalize(x), ROWS),
    "normalize by name": (lambda x: F.normalize(x, p=2.0, dim=-1), ROWS),
    "sum": (lambda x: x.sum(-1), (NODES, 3, WIDTH)),
    "mean": (lambda x: x.mean(dim=(1, 2)), (NODES, 3, 4)),
    "add": (lambda x, y: x + y, ROWS, ROWS), "add a bias": (lambda x, b: b + x, ROWS, LINE),
    "add a number": (lambda x: x + 2, ROWS), "rsub": (lambda x: 1 - x, ROWS),
    "mul a column": (lambda x, w: x * w, ROWS, (NODES, 1)),
    "mul a row": (lambda x, w: x * w, ROWS, (1, WIDTH)),
    "div": (lambda x, y: x / (y.abs() + 1), ROWS, ROWS), "pow": (lambda x: x ** 2, ROWS),
    "where": (lambda x, y: torch.where(x > 0, x, y), ROWS, ROWS),
    "cat": (lambda x, y: torch.cat([x, y], -1), ROWS, (NODES, 2)),
    "cat of one twice": (lambda x: torch.cat([x, x], dim=1), ROWS),
    "stack": (lambda x, y: torch.stack([x, y], dim=1), ROWS, ROWS),
    "another dtype": (lambda x: x.double(), ROWS),
    "embedding": (lambda w: F.embedding(torch.arange(NODES) % 8, w), WEIGHT),
    "matmul by a vector": (lambda x, w: x @ w, ROWS, LINE),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), ROWS, ROWS),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_operations(name, ran):
    function, *shapes = CASES[name]
    found, right = both(function, *shapes)
    assert max(bands for _, bands in ran) > 1, ran
    for got, truth in zip(found, right):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


#: what is not row by row runs on the host, or is nothing that makes rows
WHOLE = {
    "a sum over nodes": (lambda x: x.sum(0), ROWS),
    "a softmax over nodes": (lambda x: x.softmax(0), ROWS),
    "a mean of all": (lambda x: x.mean(), ROWS),
    "cat of nodes": (lambda x: torch.cat([x, x]), ROWS),
    "stack of tensors": (lambda x: torch.stack([x, x]), ROWS),
    "a vector": (lambda x, w: x @ w.t(), LINE, WEIGHT),
    "rows by a mask": (lambda x: x[x[:, 0] > 0], ROWS),
    "a transposed softmax": (lambda x: F.log_softmax(x, dim=-2), ROWS),
    "the same dtype": (lambda x: x.float(), ROWS),
    "a product with as many rows": (lambda x, y: x.t() @ y, ROWS, ROWS),
    "a product of many": (lambda x, y: x @ y, (NODES, 2, 3), (NODES, 3, 2)),
    "bounds by rows": (lambda x: x.clamp(x.detach() - 1, None), ROWS),
    "embeddings by frequency": (lambda w: F.embedding(torch.arange(NODES) % 8, w,
                                                      scale_grad_by_freq=True), WEIGHT),
    "no dropout": (lambda x: F.dropout(x, 0.5, False), ROWS),
    "norms over all": (lambda x: F.layer_norm(x, ROWS), ROWS),
}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_what_is_no_operation_of_rows(name, ran):
    function, *shapes = WHOLE[name]
    found, right = both(function, *shapes)
    assert not [one for one in ran if one[0] not in ("mul", "sub")]  # of the loss
    for got, truth in zip(found, right):
        torch.testing.assert_close(got, truth)


def test_operations_in_place_write():
    x = torch.randn(ROWS)
    right = x.clone().relu()
    with offload(device="cpu"), torch.no_grad():
        given = x.clone()
        assert F.relu(given, inplace=True) is given and torch.equal(given, right)
        given = x.clone()
        assert nn.LeakyReLU(0.0, inplace=True)(given) is given and torch.equal(given, right)
        out = torch.empty(ROWS)
        assert torch.add(x, 1, out=out) is out and torch.equal(out, x + 1)


def test_small_tensors_of_the_host_stay_there(ran, monkeypatch):
    monkeypatch.setattr(rowwise, "_SMALL", 1 << 20)
    with offload(device="cpu"):
        F.relu(torch.randn(ROWS))
    assert not ran


def test_dropout_is_drawn_again(ran):
    x = torch.randn(ROWS).requires_grad_()
    with offload(device="cpu"):
        out, other = F.dropout(x, 0.5), F.dropout(x, 0.5)
    assert [name for name, bands in ran if bands > 1] == ["dropout", "dropout"]
    out.sum().backward()
    dropped = out == 0
    assert not torch.equal(out, other) and 0.3 < dropped.float().mean() < 0.7
    assert torch.equal(x.grad, 2.0 * ~dropped)
    bands = dropped.view(-1, 2, WIDTH)  # of at most so many rows, which do not draw alike
    assert not torch.equal(bands[0], bands[-1])


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_takes_statistics_of_all_rows(ran, momentum, affine):
    def run():
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(WIDTH, momentum=momentum, affine=affine)
        x = (3 * torch.randn(ROWS) + 1).requires_grad_()
        for _ in range(3):
            out = norm(x)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        norm.eval()
        return [out, norm(x), x.grad, *norm.buffers(), *(p.grad for p in norm.parameters())]

    right = run()
    with offload(device="cpu"):
        found = run()
    assert [bands > 1 for name, bands in ran if name == "batch_norm"] == [True] * 4
    for got, truth in zip(found, right):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def test_devices_that_do_not_fit_are_named():
    x, beside = torch.randn(ROWS), torch.empty(NODES, NODES, device="meta")
    with offload(device="cpu"):
        with pytest.raises(OffloadError, match="^cholesky_solve of tensors in the host's memory"):
            torch.cholesky_solve(x, beside)
        with pytest.raises(RuntimeError, match="size mismatch"):  # nothing but the host's
            torch.mv(x, torch.randn(3))


def test_a_model_trains(ran):
    def run():
        return checks.trained("cpu", NODES, WIDTH, 300)

    right = run()
    with offload(8000, device="cpu") as bander:
        found = run()
    assert {name for name, _ in bander.ran} == {"GCNConv", "SAGEConv", "GATConv"}
    assert {"linear", "batch_norm", "relu", "add", "elu", "layer_norm", "cat", "log_softmax"} <= {
        name for name, _ in ran}
    for got, truth in zip(found, right):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_model_with_dropout_repeats():
    model, g = checks.Net(WIDTH), graphs.generator(3)
    x, edges = torch.randn(ROWS, generator=g), torch.randint(0, NODES, (2, 300), generator=g)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.zero_grad()
        with offload(8000, device="cpu"):
            out = model(x, edges)
            out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])


def test_inference_of_a_model_with_node_types(ran):
    from torch_geometric.nn import GATConv, HeteroConv, SAGEConv

    data = graphs.heterogeneous()
    torch.manual_seed(0)
    width = data["paper"].x.shape[1]
    convs = {key: SAGEConv((width, width), 8) for key in data.edge_types}
    convs["paper", "by", "author"] = GATConv((width, width), 8, add_self_loops=False)
    model = HeteroConv(convs)
    with torch.no_grad():
        right = model(data.x_dict, data.edge_index_dict)
        with offload(3000, device="cpu") as bander:
            found = model(data.x_dict, data.edge_index_dict)
    assert bander.ran.total() == 4
    for kind, truth in right.items():
        torch.testing.assert_close(found[kind], truth, rtol=1e-5, atol=1e-6)
