"""Messages and aggregates as libraries write them: whether there are rows, lists of ids, dtypes,
modules of torch in branches that are not taken, arguments by name, and aggregations and norms of
PyG's that a layer holds."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric import utils
from torch_geometric import nn as gnn
from torch_geometric.nn import aggr
from torch_geometric.utils import scatter

import gnnaccel
from tests.pyg.generated_calls import arguments, routes, to
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.judge import close, compare
from tests.pyg.test_generated_changes import each_seen


class AnyRows(Message):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH + EDGE, 5)

    def message(self, x_i, x_j, edge_attr):
        if len(x_j) > 0 and edge_attr.size(0) > 0:
            return self.lin(torch.cat((x_j, edge_attr), 1)) * x_i[:, :1]
        return torch.ones(0, 5)


class NoRows(Message):
    def message(self, x_i, x_j):
        if x_j.shape[0] == 0:
            return x_j.new_zeros(0, 2)
        return torch.relu(x_j - x_i) if len(x_i) != 0 else x_i


class Stacked(Message):
    """A norm of degrees, as in courses: ids are put together and taken apart again."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, size=(x.size(0), x.size(0)))

    def message(self, x_j, edge_index_i, edge_index_j, size_i, size_j):
        edge_index = torch.stack([edge_index_j, edge_index_i], dim=0)
        row, col = edge_index
        norm = utils.degree(row, size_j, dtype=x_j.dtype).clamp(min=1).pow(-0.5)
        return (norm[row] * norm[col]).view(-1, 1) * torch.tanh(x_j)


class StackedOtherwise(Stacked):
    """In the other order, of degrees of the nodes that receive."""

    def message(self, x_i, x_j, edge_index_i, edge_index_j, size_i):
        ends = torch.stack((edge_index_i, edge_index_j))
        deg = utils.degree(ends[0], size_i, dtype=x_j.dtype)
        return torch.tanh(x_j - x_i) / deg[ends[0]].view(-1, 1)


class Halves(Message):
    """Sums in float32 where messages are float16."""

    def message(self, x_i, x_j):
        return torch.sigmoid(x_i + x_j)

    def aggregate(self, gates, index, x_j, dim_size):
        total = scatter(gates * x_j, index, 0, dim_size)
        weight = scatter(gates, index, 0, dim_size)
        dtype = weight.dtype
        if dtype == torch.float16 or dtype is torch.bfloat16:
            total, weight = total.to(dtype=torch.float32), weight.to(dtype=torch.float32)
        out = total / (weight + 1e-5)
        if dtype == torch.half:
            out = out.to(dtype=dtype)
        return out


class Correlated(Message):
    """By a text; one is computed by torch.fft."""

    def __init__(self, kind="sub"):
        super().__init__()
        self.kind = kind

    def message(self, x_i, x_j):
        if self.kind == "sub":
            return torch.relu(x_j - x_i)
        if self.kind == "corr":
            return torch.fft.irfft(torch.conj(torch.fft.rfft(x_j)) * torch.fft.rfft(x_i), n=WIDTH)
        raise NotImplementedError


class Held(Message):
    """Two aggregations, neither of which is the layer's own."""

    def __init__(self):
        super().__init__(aggr=None)
        self.node_aggr, self.edge_aggr = aggr.SumAggregation(), aggr.MeanAggregation()

    def message(self, x_i, x_j, edge_attr):
        return torch.tanh(x_i * x_j), torch.relu(edge_attr * x_j[:, :1])

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        first, second = inputs
        return torch.cat([self.node_aggr(first, index, ptr, dim_size),
                          self.edge_aggr(second, index, ptr, dim_size)], -1)


class Named(Message):
    """Functions of torch by the names of all their arguments."""

    def message(self, x_i, x_j):
        far = torch.norm(input=x_j - x_i, p=2, dim=-1, keepdim=True)
        near = torch.clamp(input=far, min=0.1, max=3.0)
        return torch.sigmoid(input=x_j) / near * torch.sum(input=x_i * x_j, dim=-1, keepdim=True)


class NormOfAll(Message):
    """PyG's norm, of all edges together and of each."""

    def __init__(self):
        super().__init__()
        self.norm, self.of_each = gnn.LayerNorm(WIDTH), gnn.LayerNorm(WIDTH, mode="node")
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def message(self, x_i, x_j):
        both = torch.cat([self.norm(x_i), self.norm(x_j)], dim=-1)
        return torch.tanh(self.lin(both)) + self.of_each(x_j * x_i)


class Recorded(Message):
    """Keeps its messages as numbers, where it is told to."""

    def __init__(self):
        super().__init__()
        self.records, self.recording = [], False

    def message(self, x_i, x_j, edge_index_i, edge_index_j):
        out = torch.tanh(x_i - x_j)
        if self.recording:
            for i in range(out.size(0)):
                self.records.append({"edge": (edge_index_i[i].item(), edge_index_j[i].item()),
                                     "message": out[i].detach().cpu().numpy(),
                                     "first": out[i, :2].tolist()})
        return out


class Matrices(Message):
    """A matrix of each edge, beside the identity, and one of the identity alone."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2 * WIDTH, 9)

    def message(self, x_i, x_j):
        mat = self.net(torch.cat([x_i, x_j], -1)).view(-1, 3, 3)
        mat = mat + torch.eye(3, device=mat.device)[None, ...]
        return torch.bmm(mat, (x_j - x_i).view(-1, 3, WIDTH // 3)).reshape(-1, WIDTH)

    def aggregate(self, inputs, index, dim_size):
        out = scatter(inputs, index, 0, dim_size)
        return out @ (2 * torch.eye(WIDTH, 4, device=inputs.device, dtype=inputs.dtype))


CLASSES = [AnyRows, NoRows, Stacked, StackedOtherwise, Halves, Correlated, Held, Named, NormOfAll,
           Recorded, Matrices]


@pytest.mark.parametrize("cls", CLASSES)
def test_values_and_gradients(kernels, cls):
    for train in (True, False):
        compare(kernels, cls(), *arguments(cls), train=train)


@pytest.mark.parametrize("cls", [Stacked, StackedOtherwise])
def test_ids_against_the_flow(kernels, cls):
    layer = cls()
    layer.flow = "target_to_source"
    compare(kernels, layer, *arguments(cls))


@pytest.mark.long
@pytest.mark.parametrize("cls", [AnyRows, NoRows])
def test_no_edges_go_the_other_way(emulated, cls):
    """Before a call with some, and after."""
    layer, (x, edges, edge) = cls(), arguments(cls)
    none = x, edges[:, :0], edge[:0]
    for given in (none, (x, edges, edge), none, (x, edges, edge), none):
        with gnnaccel.disabled():
            expected = layer(*given)
        gnnaccel.reset_stats()
        with emulated.on(on_fallback="native"):
            got = layer(*given)
        assert got.shape == expected.shape and close(got, expected)
        assert routes(layer) == {"cuda" if given[1].numel() else "native": 1}


def test_texts_that_name_other_functions(kernels):
    layer = Correlated()
    each_seen(kernels, layer, *arguments(Correlated), changes=(
        lambda: setattr(layer, "kind", "corr"),), taken="native")


class OnesOfDefault(Message):
    """Of torch's default dtype, whatever that of the features."""

    def message(self, x_i, x_j):
        return torch.relu(x_j - x_i) * torch.ones(x_j.size(0), 1, device=x_j.device)


class ZerosOfDefault(Message):
    def message(self, x_i, x_j):
        zeros = torch.zeros(x_j.size(0), 2, device=x_j.device)
        return torch.cat([torch.relu(x_j - x_i), zeros], -1)


@pytest.mark.long
@pytest.mark.parametrize("cls", [OnesOfDefault, ZerosOfDefault])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64, torch.float32),
                                    (torch.float64, torch.float32, torch.float64)])
def test_another_default_dtype(kernels, cls, dtypes):
    """Features of float32 beside ones of float64 give float64."""
    layer, given = cls().to(kernels.device), to(kernels.device, *arguments(cls))
    before = torch.get_default_dtype()
    try:
        for dtype in dtypes:
            torch.set_default_dtype(dtype)
            with gnnaccel.disabled():
                expected = layer(*given)
            gnnaccel.reset_stats()
            with kernels.on(on_fallback="native"):
                got = layer(*given)
            assert got.dtype == expected.dtype == dtype and close(got, expected)
            assert dtype == torch.float32 or routes(layer) == {"native": 1}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.long
def test_a_message_that_records(kernels):
    layer = Recorded().to(kernels.device)
    given = to(kernels.device, *arguments(Recorded))
    for recording in (False, True, False, True):
        layer.recording = recording
        layer.records.clear()
        with gnnaccel.disabled():
            expected = layer(*given)
        records = layer.records[:]
        layer.records.clear()
        gnnaccel.reset_stats()
        with kernels.on(on_fallback="native"):
            assert close(layer(*given), expected)
        assert routes(layer) == {"native" if recording else "cuda": 1}
        assert [one["first"] for one in layer.records] == [one["first"] for one in records]
        assert len(records) == (given[1].shape[1] if recording else 0)


def test_aggregations_that_change(kernels):
    layer = Held()
    each_seen(kernels, layer, *arguments(Held), changes=(
        lambda: setattr(layer, "node_aggr", aggr.MaxAggregation()), layer.eval,
        lambda: setattr(layer, "edge_aggr", aggr.SumAggregation()),
        lambda: setattr(layer, "edge_aggr", aggr.StdAggregation())), taken="native")


def test_an_aggregation_with_a_hook(kernels):
    layer = Held()
    hook = layer.edge_aggr.register_forward_hook
    each_seen(kernels, layer, *arguments(Held), changes=(
        lambda: hook(lambda module, args, out: out * 2),), taken="native")


def test_a_norm_that_changes(kernels):
    layer = NormOfAll()

    def write():
        with torch.no_grad():
            layer.norm.weight.mul_(0.3)

    def watch():
        layer.norm.register_forward_hook(lambda module, args, out: out * 2)

    each_seen(kernels, layer, *arguments(NormOfAll), changes=(
        write, layer.eval, lambda: setattr(layer.norm, "eps", 0.2),
        lambda: setattr(layer.norm, "mode", "node"), watch), taken="native")


class PartOf(Message):
    """The method of a held aggregation that is no call of it."""

    def __init__(self):
        super().__init__()
        self.node_aggr = aggr.SumAggregation()

    def message(self, x_i, x_j):
        return torch.tanh(x_j - x_i)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return self.node_aggr.reduce(inputs, index, ptr, dim_size, -2, "mean")


class StackedAsColumns(Stacked):
    def message(self, x_j, edge_index_i, edge_index_j):
        ends = torch.stack([edge_index_j, edge_index_i], dim=1)
        return torch.tanh(x_j) * (ends[:, 0] - ends[:, 1]).view(-1, 1)


class StackedWhole(Stacked):
    """Reads ids as numbers."""

    def message(self, x_j, edge_index_i, edge_index_j):
        ends = torch.stack([edge_index_j, edge_index_i])
        return torch.tanh(x_j) * ends.sum(0).view(-1, 1)


class AsksInList(Message):
    """Whether something that may be None is so."""

    def message(self, x_i, x_j, ptr, dim_size):
        return torch.tanh(x_j - x_i) if None in [dim_size, ptr] else x_j


class ManyRows(Message):
    def message(self, x_i, x_j):
        return x_j * torch.relu(x_i) if len(x_j) > 1 else x_j


class Counted(Message):
    """What the layer's nodes are told by is compared, not its rows."""

    def forward(self, x, edge_index, edge_attr=None):
        return self.propagate(edge_index, x=x, table=x[:0], edge_attr=edge_attr)

    def message(self, x_i, x_j, table):
        return torch.relu(x_j - x_i) if table.size(0) > 0 else torch.tanh(x_j - x_i)


class NamedWhere(Message):
    """The first argument is another than the input."""

    def message(self, x_i, x_j):
        return torch.where(condition=x_j > x_i, input=torch.tanh(x_j), other=x_i)


class NormOfGraphs(NormOfAll):
    """One for each graph of a batch."""

    def message(self, x_i, x_j, edge_index):
        return self.norm(x_j * x_i, edge_index[1])


class Square(Message):
    """As many rows as there are edges."""

    def message(self, x_i, x_j):
        return torch.eye(x_j.size(0), device=x_j.device) @ torch.relu(x_j - x_i)


class ToDouble(Message):
    def message(self, x_i, x_j):
        return torch.relu(x_j.to(torch.float64) - x_i)


NEAR = [PartOf, StackedAsColumns, StackedWhole, AsksInList, ManyRows, Counted, ToDouble, NamedWhere,
        NormOfGraphs, Square]


@pytest.mark.parametrize("cls", NEAR)
def test_near_forms(kernels, cls):
    """Whatever runs them, results are the host's."""
    layer, given = cls().to(kernels.device), to(kernels.device, *arguments(cls))
    for _ in range(2):
        with kernels.on(on_fallback="native"):
            got = layer(*given)
        with gnnaccel.disabled():
            expected = layer(*given)
        assert got.dtype == expected.dtype and close(got, expected)


@pytest.mark.parametrize("cls", [PartOf, StackedAsColumns, StackedWhole, ManyRows, ToDouble,
                                 NormOfGraphs, Square])
def test_near_forms_stay_native(emulated, cls):
    layer, given = cls(), arguments(cls)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        layer(*given)
    assert routes(layer) == {"native": 1}
