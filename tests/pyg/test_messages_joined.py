"""Several messages of one class, which one kernel sums."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from gnnaccel.adapters.tracing.rows import channels, pieces
from gnnaccel.cuda.messages import generated
from gnnaccel.dispatch.generated.operations import Pieces
from tests.pyg import graphs
from tests.pyg.generated_calls import hub, to
from tests.pyg.graphs import N
from tests.pyg.judge import close, compare

WIDTH = 8


class Two(MessagePassing):
    """Results for each of two messages, `how` reduced."""

    how = ("sum", "sum")

    def __init__(self):
        super().__init__(node_dim=0)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def aggregate(self, inputs, index, dim_size):
        return tuple(scatter(one, index, 0, dim_size, reduce)
                     for one, reduce in zip(inputs, self.how))

    def update(self, inputs):
        return inputs


class Gates(Two):
    """Both read both ends and the edge."""

    def message(self, x_i, x_j, edge_attr):
        return x_j * torch.sigmoid(edge_attr + x_i), (x_i - x_j) * edge_attr


class Means(Gates):
    how = ("mean", "mean")


class Within(Two):
    """One message is a part of the other."""

    def message(self, x_i, x_j, edge_attr):
        product = x_j * edge_attr
        return product, torch.tanh(product) * x_i


class Norms(Two):
    """Sums over channels in both."""

    def message(self, x_i, x_j, edge_attr):
        norm = (x_i * x_j).sum(-1, keepdim=True)
        return norm * edge_attr, x_j * (norm - x_j.sum(-1, keepdim=True)) + edge_attr


class Vectors(Two):
    """PaiNN's: a scalar and a vector, made of the same rows."""

    how = ("sum", "sum")

    def __init__(self):
        super().__init__()
        self.filter = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, edge_index, edge_attr):
        h, v = torch.cat([x, x.sin(), -x], -1), torch.stack([x, x.cos(), 2 * x], 1)
        out, vectors = self.propagate(edge_index, h=h, v=v, w=self.filter(edge_attr),
                                      d=edge_attr[:, :3])
        return out, vectors.flatten(1)

    def message(self, h_j, v_j, w, d):
        x, a, b = torch.split(h_j * w, WIDTH, dim=-1)
        return x, v_j * a.unsqueeze(1) + b.unsqueeze(1) * d.unsqueeze(2)


class Steps(Two):
    """Pieces whose numbers do not lie one after the other, beside such as do."""

    def message(self, x_i, x_j, edge_attr):
        return (x_j[:, ::2] * edge_attr[:, 1::2] + x_j[:, :4],
                x_j[:, ::2] - x_i.view(-1, 4, 2)[..., 0] * edge_attr[:, 4:])


class Tables(Two):
    """Numbers of a source along rows of a table and along its columns, which are not the same."""

    def forward(self, x, edge_index, edge_attr):
        outs = self.propagate(edge_index, x=x[:, :4], y=x[:, 4:6], edge_attr=edge_attr.repeat(1, 2))
        return [out.flatten(1) for out in outs]

    def message(self, x_j, y_j, edge_attr):
        along, down = x_j.view(-1, 1, 1, 4), x_j.view(-1, 2, 2, 1)
        return (along * down * y_j.view(-1, 2, 1, 1),
                along * y_j.view(-1, 2, 1, 1) + down * edge_attr.view(-1, 2, 2, 4))


class Signs(Two):
    """The sign has a gradient of zeros."""

    def message(self, x_i, x_j, edge_attr):
        return torch.sign(x_j), torch.tanh(x_j * edge_attr) * x_i


class Apart(Two):
    """No row in common."""

    def message(self, x_i, x_j, edge_attr):
        return x_i * 2 - 1, x_j * torch.sigmoid(edge_attr)


class Otherwise(Gates):
    """Not reduced alike."""

    how = ("sum", "max")


class Cat(nn.Module):
    """The results of a layer side by side."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return torch.cat(self.layer(*args), -1)


JOINED = [Gates, Means, Within, Norms, Vectors, Steps, Tables, Signs]


@pytest.fixture
def results(monkeypatch):
    """How many results each kernel that sums messages had."""
    counts = []
    forward = generated.forward

    def counted(*args):
        outs = forward(*args)
        counts.append(len(outs))
        return outs

    monkeypatch.setattr(generated, "forward", counted)
    return counts


def given(edges: int = graphs.E) -> tuple[torch.Tensor, ...]:
    return (torch.randn(N, WIDTH), graphs.square(edges=edges), torch.randn(edges, WIDTH))


@pytest.mark.parametrize("form", [*JOINED, Apart, Otherwise])
def test_values_and_gradients(kernels, results, form):
    compare(kernels, Cat(form()), *given())
    assert (max(results) > 1) is (form in JOINED)


@pytest.mark.parametrize("form", JOINED)
def test_split_rows(kernels, form):
    edge_index = hub()
    compare(kernels, Cat(form()), torch.randn(N, WIDTH), edge_index,
            torch.randn(edge_index.shape[1], WIDTH))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether differences are of rounding. Over the same edges in another order the host's own
    gradients, also second ones, differ by up to 6e-5 of the largest."""
    return bool((a - b).abs().max() <= 5e-4 * b.abs().max())


@pytest.mark.parametrize("form", JOINED)
def test_second_derivatives(kernels, form):
    layer, (x, edge_index, edge) = form().to(kernels.device), to(kernels.device, *given())

    def second():
        leaves = [x.clone().requires_grad_(), edge.clone().requires_grad_(), *layer.parameters()]
        first, other = layer(leaves[0], edge_index, leaves[1])
        grads = torch.autograd.grad(first.square().sum() + other.sin().sum(), leaves,
                                    create_graph=True, allow_unused=True)
        total = sum(grad.square().sum() for grad in grads if grad is not None)
        return torch.autograd.grad(total, leaves, allow_unused=True)

    expected = second()
    with kernels.on():
        got = second()
    for a, b in zip(got, expected):
        assert (a is None) is (b is None) and (a is None or near(a, b))


@pytest.mark.long
def test_gradients_of_pieces_are_written_in_place(kernels, monkeypatch):
    """What a message cuts out of rows, as by `split`, has one gradient, which nothing copies."""
    layer = Vectors().to(kernels.device)
    x, edge_index, edge = to(kernels.device, *given())
    copies, recorded = [], Pieces.recorded
    monkeypatch.setattr(Pieces, "recorded", lambda self, *args: copies.append(self.places)
                        or recorded(self, *args))
    for _ in range(8):  # in the first calls kernels get copies, while it is seen who writes to rows
        copies.clear()
        with kernels.on():
            sum(out.sin().sum() for out in layer(x.requires_grad_(), edge_index, edge)).backward()
    assert not copies


def test_where_pieces_are():
    """None where there is a copy, in an order that kernels read: columns of their own, say."""
    place = pieces._place
    assert place(lambda rows: rows.split(4, -1), (8,), 1) == (4, 8)
    assert place(lambda rows: rows.unbind(1), (3, 8), 2) == (16, 24)
    assert place(lambda rows: rows[:, 2:3], (8,), None) == (2, 3)
    assert place(lambda rows: rows[:, ::2], (8,), None) is None
    assert place(channels._columns, (3,), 0) is None


class Separate(Two):
    """Each result has an argument that the other has not."""

    def forward(self, x, edge_index, edge_attr, left, right):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, left=left, right=right)

    def message(self, x_j, edge_attr, left_j, right_i):
        return x_j * edge_attr * left_j, x_j * edge_attr / right_i


class OneEnd(Separate):
    """Both of these at the source."""

    def message(self, x_j, edge_attr, left_j, right_j):
        return x_j * edge_attr * left_j, x_j * edge_attr - right_j


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_what_is_used(kernels, results, used):
    """What no used result is made of has no gradient, rather than zeros, and an infinite derivative
    of the other result is not seen."""
    layer, (x, edge_index, edge) = Separate().to(kernels.device), to(kernels.device, *given())
    right = torch.randn(N, WIDTH, device=kernels.device)
    right[3] = 0

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (x, edge, x + 1, right)]
        outs = layer(leaves[0], edge_index, *leaves[1:])
        sum(outs[at].nan_to_num(0, 0, 0).sum() for at in used).backward()
        return [t.grad for t in leaves]

    expected = gradients()
    with kernels.on():
        got = gradients()
    assert max(results) == 2
    for a, b in zip(got, expected):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_result_whose_gradients_are_zeros(kernels, results):
    """It requires a gradient, and may be the only one that is used."""
    layer, (x, edge_index, edge) = Signs().to(kernels.device), to(kernels.device, *given())
    with kernels.on():
        first, other = layer(x.requires_grad_(), edge_index, edge.requires_grad_())
        assert first.requires_grad and other.requires_grad
        first.sum().backward()
    assert max(results) == 2 and edge.grad is None and not x.grad.any()


def test_results_without_gradient(kernels, results):
    """A result has a gradient where natively it has one."""
    layer, (x, edge_index, edge) = Separate().to(kernels.device), to(kernels.device, *given())
    with kernels.on():
        for wanting in ((), (2,), (3,), (2, 3)):
            leaves = [t.clone().requires_grad_(at in wanting)
                      for at, t in enumerate((x, edge, x + 1, x - 1))]
            outs = layer(leaves[0], edge_index, *leaves[1:])
            assert [out.requires_grad for out in outs] == [2 in wanting, 3 in wanting]
            assert all(out.is_leaf is not out.requires_grad for out in outs)
            if wanting:
                sum(out.sum() for out in outs).backward()
    assert max(results) == 2


@pytest.mark.parametrize("of_whole", [False, True])
def test_gradients_of_slices_are_contiguous(kernels, results, of_whole):
    """Arguments that are, together, the rows of one tensor are not ours: users see their gradients,
    as in hooks, and view them in other shapes."""
    layer = OneEnd().to(kernels.device)
    x, edge_index, edge = to(kernels.device, *given())
    both = torch.randn(N, 2 * WIDTH, device=kernels.device).requires_grad_(of_whole)
    with kernels.on():
        for _ in range(8):
            left, right = both.chunk(2, -1) if of_whole else (
                both[:, :WIDTH].detach().requires_grad_(), both[:, WIDTH:].detach().requires_grad_())
            first, other = layer(x, edge_index, edge, right, left)
            grads = torch.autograd.grad(first.sum() + other.sum(), (left, right))
            assert all(grad.is_contiguous() for grad in grads)
    assert max(results) == 2


def test_results_changed_in_place(kernels):
    """Each result has memory of its own."""
    layer, args = Gates().to(kernels.device), to(kernels.device, *given())
    expected, other = layer(*args)
    expected.mul_(2)
    with kernels.on():
        got, also = layer(*args)
        got.mul_(2)
    assert close(got, expected) and close(also, other)


@pytest.mark.long
def test_reductions_that_change(kernels):
    """The class reduces otherwise from one call to the next."""
    layer = Gates()
    for how in (("sum", "sum"), ("mean", "mean"), ("sum", "mean"), ("max", "max"), ("sum", "sum")):
        layer.how = how
        compare(kernels, Cat(layer), *given())


class Beside(MessagePassing):
    """Two messages side by side, by the host's aggregation."""

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return torch.cat([x_i * x_j, x_j + edge_attr], -1)


@pytest.mark.long
def test_aggregations_that_change(kernels, results):
    layer = Beside()
    for aggr in ("sum", "max", "mean", "min", "sum"):
        layer.aggr_module = Beside(aggr=aggr).aggr_module
        compare(kernels, layer, *given())
    assert max(results) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("form", JOINED)
def test_captured_by_hand(gpu, form):
    """A graph that is replayed reads what lies in memory then, and edges that are others."""
    layer, (x, edge_index, edge) = form().to(gpu.device), to(gpu.device, *given())
    leaves = [x.requires_grad_(), edge.requires_grad_(), *layer.parameters()]

    def step():
        outs = layer(leaves[0], edge_index, leaves[1])
        return [*outs, *torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)]

    with gpu.on():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(8):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step()
    for _ in range(2):
        with torch.no_grad():
            for t in leaves:
                t.normal_()
            edge_index.copy_(edge_index[:, torch.randperm(edge_index.shape[1])].flip(0))
        graph.replay()
        assert all(map(near, got, step()))
