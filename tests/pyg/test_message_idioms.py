"""Ways to write a message that public layers have: torch's functions by other names, pieces that
the edge's kind picks, heads before edges, sums within a message, what is kept for the user."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.utils
from torch import Tensor, nn
from torch_geometric.utils import scatter, softmax

import gnnaccel
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import EDGE, WIDTH, Message
from tests.pyg.graphs import N
from tests.pyg.judge import close, compare

KINDS, HEADS = 3, 2


class Axis(Message):
    def message(self, x_i, x_j):
        out = torch.concatenate([x_j, x_i - x_j], axis=1)
        return torch.column_stack([out.tanh(), x_i.sum(axis=-1, keepdims=True)])


class NotNone(Message):
    def message(self, x_i, x_j, edge_attr):
        out = torch.sigmoid(x_i * x_j)
        if edge_attr != None and not x_j == None:  # noqa: E711 - as users write it
            out = out * edge_attr[:, :1]
        return out


class ByOwnSums(Message):
    """GCN's norm of weighted degrees, made in the message."""

    edge = None

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, weight=edge_attr.abs(), size=(len(x), len(x)))

    def message(self, x_j, edge_index, size, weight):
        row, col = edge_index
        degrees = torch.zeros(size[0], device=row.device, dtype=x_j.dtype)
        degrees.scatter_add_(0, row, weight)
        counts = torch.zeros(size[1], device=col.device, dtype=x_j.dtype)
        counts = counts.index_add(0, col, torch.ones(col.size(0), dtype=x_j.dtype,
                                                     device=col.device))
        norm = degrees.clamp(min=0.1).pow(-0.5)
        return (norm[row] * weight / counts[col]).view(-1, 1) * x_j


class ByDistance(Message):
    """Weights that add up to one, of one number for each edge."""

    edge = None

    def message(self, x_j, edge_attr, edge_index):
        weight = 1.0 / torch.max(edge_attr.abs(), torch.Tensor([1e-1]).to(edge_attr.device))
        row, col = edge_index
        total = scatter(weight, col, dim=0, dim_size=None)[col] + 1e-16
        weight /= total
        return weight.view(-1, 1) * x_j


class PickedByKind(Message):
    """Maps of all kinds, of which each edge takes its own."""

    edge = None

    def __init__(self):
        super().__init__()
        self.basis, self.bias = (nn.Parameter(torch.randn(WIDTH, KINDS * 4)),
                                 nn.Parameter(torch.randn(KINDS, 4)))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, kind=kinds(edge_attr))

    def message(self, x_j, kind):
        all_kinds = torch.matmul(x_j, self.basis).view(-1, self.bias.shape[0], 4)
        return F.relu(all_kinds[torch.arange(kind.shape[0]), kind, :] + self.bias[kind])


def kinds(edge_attr: Tensor) -> Tensor:
    return (edge_attr.detach() * 3).long() % KINDS


class Undefined(Message):
    """Memory that every edge's kind writes to."""

    edge = None

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(KINDS))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, kind=kinds(edge_attr))

    def message(self, x_i, x_j, kind):
        out = torch.empty_like(x_j)
        for k in range(KINDS):
            mask = kind == k
            if mask.sum() > 0:
                out[mask] = self.lins[k](x_j[mask] + x_i[mask])
        return out


class HeadsFirst(Message):
    def __init__(self, **options):
        super().__init__(**options)
        self.lin, self.att = (nn.Linear(WIDTH + EDGE, HEADS * 4),
                              nn.Parameter(torch.randn(1, HEADS, 8)))

    def message(self, x_i, x_j, edge_attr, edge_index_i):
        left, right = [self.lin(torch.cat([one, edge_attr], -1)).view(-1, HEADS, 4)
                       for one in (x_i, x_j)]
        alpha = F.leaky_relu((torch.cat([left, right], -1) * self.att).sum(-1))
        alpha = softmax(alpha, edge_index_i)
        return (right * alpha.view(-1, HEADS, 1)).transpose(0, 1)

    def update(self, out):
        return out.mean(0)


class Outer(Message):
    """The products of all channels, as one row."""

    def message(self, x_i, x_j, edge_attr):
        outer = torch.einsum("bi,bj->bij", x_i[:, :3], x_j[:, :3])
        return edge_attr[:, :1] * outer.view(-1, 9)


class Keeps(Message):
    """The weights and the ids that they belong to."""

    def message(self, x_i, x_j, edge_index_i, index, size_i):
        alpha = softmax((x_i * x_j).sum(-1, keepdim=True), edge_index_i, num_nodes=size_i)
        self.kept = (edge_index_i, alpha, ("name", index), 2)
        return alpha * x_j


class WithAggr(Message):
    """An argument that PyG never gives."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j)

    def aggregate(self, inputs, index, ptr=None, dim_size=None, aggr=None):
        if ptr is not None:
            return torch_geometric.utils.segment(inputs, ptr)
        return scatter(inputs, index, self.node_dim, dim_size, self.aggr if aggr is None else aggr)


LAYERS = [Axis, NotNone, ByOwnSums, ByDistance, PickedByKind, Undefined, HeadsFirst, Outer, Keeps,
          WithAggr]


def given(cls):
    x, ei, edge = arguments(cls)
    return [x, ei, edge] if cls not in (Axis, Keeps, WithAggr) else [x, ei]


@pytest.mark.parametrize("cls", LAYERS)
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *given(cls), require=cls not in (PickedByKind, Undefined))


@pytest.mark.long
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("cls", LAYERS)
def test_repeated_and_over_other_edges(emulated, cls, flow):
    """Other edges, weights and numbers, int32 ids, one edge and none, in either direction."""
    layer, (x, ei, *edge) = cls(), given(cls)
    layer.flow = flow
    ends = torch.cat([ei, torch.tensor([[N - 1], [N - 1]])], 1)
    edge = [torch.cat([one, one[:1]]) for one in edge]
    for k, index in enumerate((ends, ends.flip(1), ends.flip(0), ends.int(), ends[:, :-40])):
        if index.dtype is torch.int32 and cls is Axis:
            continue  # torch refuses such ids for so many channels
        args = [x * (1 + k), index, *[one[:index.shape[1]] for one in edge]]
        expected = layer(*args)
        with emulated.on(on_fallback="native"):
            for _ in range(2):
                got = layer(*args)
        assert close(got, expected)
        with torch.no_grad():
            for one in layer.parameters():
                one.mul_(0.9)
    for count in (1, 0):
        args = [x, ends[:, -1:][:, :count], *[one[:count] for one in edge]]
        results = []
        for on in (False, True):
            try:
                with emulated.on(on_fallback="native") if on else torch.enable_grad():
                    results.append(layer(*args))
            except (RuntimeError, IndexError) as why:  # the host refuses some without edges
                results.append(type(why))
        assert results[0] is results[1] or close(results[1], results[0])


@pytest.mark.long
def test_all_are_taken_over(emulated):
    for cls in LAYERS:
        layer, args = cls(), given(cls)
        gnnaccel.reset_stats()
        with emulated.on(on_fallback="native"):
            layer(*args)
        assert routes(layer) == {"cuda": 1}, cls


@pytest.mark.long
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_what_is_kept_is_the_hosts(emulated, flow):
    layer, (x, ei) = Keeps(flow=flow), given(Keeps)
    for index in (ei, ei.int(), ei.flip(0)):
        layer(x, index)
        ids, alpha, (name, again), count = layer.kept
        with emulated.on():
            for _ in range(2):
                layer.kept = None
                layer(x, index)
                assert torch.equal(layer.kept[0], ids) and layer.kept[0].dtype == index.dtype
                assert close(layer.kept[1], alpha) and layer.kept[1].requires_grad is False
                assert layer.kept[2][0] == name and torch.equal(layer.kept[2][1], again)
                assert layer.kept[3] == count


class KeepsOneTwice(Keeps):
    """The same tensor in several places."""

    def forward(self, x, edge_index, views=False):
        self.views = views
        out = self.propagate(edge_index, x=x)
        (first, last), other = self.kept, self.other
        first.fill_(2.0)
        return out, last.sum(), other.sum()

    def message(self, x_i, x_j):
        alpha = torch.sigmoid(x_i * x_j)
        self.kept, self.other = (alpha, alpha), alpha.flatten() if self.views else alpha
        return alpha * x_j


@pytest.mark.parametrize("views", [False, True])
def test_what_is_kept_twice_is_one_tensor(emulated, views):
    """Or it stays native, where one of them is a view."""
    layer, (x, ei) = KeepsOneTwice(), given(Keeps)
    expected = layer(x, ei, views)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        for _ in range(2):
            assert all(map(close, layer(x, ei, views), expected))
    assert routes(layer) == {"native" if views else "cuda": 2}


def test_undefined_memory_that_torch_fills(emulated):
    """Where torch fills it with NaN, edges of no kind get NaN."""
    layer, (x, ei, edge) = Undefined(), given(Undefined)
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            gnnaccel.reset_stats()
            with emulated.on(on_fallback="native"):
                layer(x, ei, edge)
            assert routes(layer) == {"native" if on else "cuda": 1}
        finally:
            torch.use_deterministic_algorithms(False)


def test_another_default_dtype(emulated):
    layer, (x, ei, edge) = ByDistance(), given(ByDistance)
    with emulated.on(on_fallback="native"):
        layer(x, ei, edge)
        layer(x, ei, edge)
        torch.set_default_dtype(torch.float64)
        try:
            got = layer(x, ei, edge)
        finally:
            torch.set_default_dtype(torch.float32)
    assert got.dtype is torch.float64


# --- near to these, and not read ------------------------------------------------------------------

class KindOfInt32(PickedByKind):
    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, kind=kinds(edge_attr).int())


class OtherNumbers(PickedByKind):
    """The pieces of as many rows from the second on."""

    def message(self, x_j, kind):
        all_kinds = torch.matmul(x_j, self.basis).view(-1, KINDS, 4)
        return all_kinds[torch.arange(1, kind.shape[0] + 1) - 1, kind]


class SumsOfAll(ByOwnSums):
    """Into as many zeros as there are edges."""

    def message(self, x_j, edge_index, size, weight):
        sums = torch.zeros(weight.shape[0], dtype=x_j.dtype)
        sums.scatter_add_(0, edge_index[0], weight)
        return sums[edge_index[0]].view(-1, 1) * x_j


class KeepsAList(Keeps):
    def message(self, x_i, x_j, edge_index_i):
        self.kept = [edge_index_i]
        return torch.tanh(x_i - x_j)


class TensorOfSize(ByDistance):
    def message(self, x_j, edge_attr):
        return x_j * edge_attr.view(-1, 1) * torch.Tensor(1).fill_(2.0)


class KeywordsOfPython(Message):
    """torch's functions in Python take no name of numpy's, and none takes both."""

    def __init__(self, both):
        super().__init__()
        self.both = both

    def message(self, x_i, x_j):
        out = x_i * x_j
        return out.sum(dim=1, axis=1) if self.both else F.normalize(out, axis=1)


@pytest.mark.parametrize("both", [True, False])
def test_names_that_torch_refuses(emulated, both):
    layer, args = KeywordsOfPython(both), given(Keeps)
    for on in (False, True):
        with pytest.raises(TypeError):
            if on:
                with emulated.on(on_fallback="native"):
                    layer(*args)
            else:
                layer(*args)


@pytest.mark.parametrize("cls", [OtherNumbers, SumsOfAll, KeepsAList, TensorOfSize, KindOfInt32])
def test_near_forms_stay_native(emulated, cls):
    layer, args = cls(), given(cls) if cls is not KeepsAList else given(Keeps)
    expected = layer(*args)
    gnnaccel.reset_stats()
    with emulated.on(on_fallback="native"):
        got = layer(*args)
    assert close(got, expected) and routes(layer) == {"native": 1}


def test_heads_first_in_another_dimension_than_the_layers(emulated):
    """The layer would add up heads."""
    layer, args = HeadsFirst(node_dim=0), given(HeadsFirst)
    with pytest.raises(Exception) as host:
        layer(*args)
    with emulated.on(on_fallback="native"), pytest.raises(type(host.value)):
        layer(*args)


# --- reductions that users write themselves, told how many rows or not ----------------------------

class ByHand(Message):
    """As torch_scatter has it in Python."""

    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return self.scatter_sum(inputs, index)

    def scatter_sum(self, src, index, dim_size=None):
        if dim_size is None:
            dim_size = int(index.max().item()) + 1 if index.numel() > 0 else 0
        out = src.new_zeros(dim_size, src.size(1))
        return out.scatter_add_(0, index.unsqueeze(-1).expand_as(src), src)


class ByHandOfLists(ByHand):
    def scatter_sum(self, src, index, dim=0, dim_size=None):
        size = list(src.size())
        if dim_size is not None:
            size[dim] = dim_size
        elif index.numel() == 0:
            size[dim] = 0
        else:
            size[dim] = int(index.max()) + 1
        if type(dim) is not int or not isinstance(dim, int):
            raise TypeError
        return torch.zeros(size, dtype=src.dtype, device=src.device).index_add_(dim, index, src)


@pytest.mark.parametrize("cls", [ByHand, ByHandOfLists])
def test_scatters_by_hand(kernels, cls):
    x, ei, _ = arguments(cls)
    compare(kernels, cls(), x, torch.cat([ei, torch.tensor([[N - 1], [N - 1]])], 1))


@pytest.mark.parametrize("cls", [ByHand, ByHandOfLists])
def test_scatters_by_hand_end_with_the_last_node_that_an_edge_enters(emulated, cls):
    """Which a call over other edges, and one over none, may change."""
    layer, (x, ei, _) = cls(), arguments(cls)
    whole = torch.cat([ei, torch.tensor([[N - 1], [N - 1]])], 1)
    with emulated.on(on_fallback="native"):
        shapes = [layer(x, index).shape for index in (whole, whole, ei, whole, ei, ei[:, :0])]
    assert shapes == [layer(x, index).shape for index in (whole, whole, ei, whole, ei, ei[:, :0])]
    assert shapes[2][0] < N and shapes[-1][0] == 0
