"""Messages that name devices, make tensors of numbers, or draw numbers for each edge."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.utils import scatter

from gnnaccel.adapters.tracing.layer import devices
from tests.pyg.generated_calls import arguments, both, stays_native
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.judge import close, compare

WHERE = torch.device("cpu")


class Placed(Message):
    """Rows moved to where they are, by devices under several names."""

    edge = WIDTH

    def __init__(self):
        super().__init__()
        self.lin, self.device = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x, edge_index, edge_attr):
        self.device = x.device
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        gate = torch.sigmoid(self.lin(x_i - x_j).to(self.device)).to(self.lin.weight.device)
        ones = torch.ones(x_i.size(0), x_i.size(1), dtype=x_i.dtype).to(self.device)
        edge = edge_attr.to(x_j.device, x_j.dtype).to(self.lin.weight.dtype, non_blocking=True)
        return gate * edge.to(device=self.device) + ones * self.lin.bias.to(x_i.device)


class RadialBasis(Message):
    """Distances in a basis whose centres the message makes."""

    def __init__(self):
        super().__init__()
        self.cutoff, self.lin = 3.0, nn.Linear(6, WIDTH, bias=False)

    def message(self, x_i, x_j):
        distance = (x_i - x_j).norm(dim=-1, keepdim=True) + 0.5
        orders = torch.arange(1, 7, device=x_j.device, dtype=x_j.dtype)
        centres = torch.linspace(0.0, self.cutoff, 6).to(x_j)
        rows = torch.sin(orders * distance / self.cutoff) / distance
        return x_j * self.lin(rows + torch.exp(-(distance - centres) ** 2))


class MadeOfNumbers(Message):
    """Numbers and matrices as tensors; rows that are one number."""

    def message(self, x_i, x_j):
        half = torch.tensor(0.5, dtype=x_j.dtype, device=x_j.device)
        signs = torch.tensor([1.0, -1.0, 2.0] * 4, device=x_j.device).to(x_j.dtype)
        turned = x_j @ (torch.eye(WIDTH, device=x_j.device).to(x_j.dtype) * half)
        return torch.tanh(turned - x_i * signs) + torch.full_like(x_j, 0.25) * x_i


class NotANumber(Message):
    """What is none or infinite becomes a number, without a gradient."""

    def message(self, x_i, x_j):
        ratio = torch.nan_to_num(x_j / torch.relu(x_i), nan=0.5, posinf=2.0)
        whole = torch.where(torch.isfinite(x_i / torch.relu(x_j)), x_i, 3.0 * x_j)
        return torch.where(torch.isnan(ratio) | torch.isinf(ratio), whole, torch.tanh(ratio)) + whole


class ConstantsInAggregate(Message):
    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j)

    def aggregate(self, inputs, index, dim_size):
        sums = scatter(inputs, index, 0, dim_size)
        return sums * torch.arange(WIDTH, device=sums.device).to(sums.dtype)


@pytest.mark.parametrize("cls", [Placed, RadialBasis, MadeOfNumbers, ConstantsInAggregate])
def test_values_and_gradients(kernels, cls):
    compare(kernels, cls(), *arguments(cls)[:3 if cls is Placed else 2])


def test_numbers_in_place_of_none(kernels):
    x, ei, _ = arguments(Message)
    x[:, 0], x[3, 1] = x[:, 0].relu(), float("inf")
    layer, found = NotANumber().to(kernels.device), []
    for way in (None, kernels):
        given = x.to(kernels.device).requires_grad_()
        if way is None:
            out = layer(given, ei.to(kernels.device))
        else:
            with way.on():
                out = layer(given, ei.to(kernels.device))
        (torch.nan_to_num(out) * torch.arange(WIDTH, device=out.device)).sum().backward()
        found.append((out, given.grad))
    assert all(torch.allclose(a, b, 1e-4, 1e-4, equal_nan=True) for a, b in zip(*found))
    assert found[0][0].isinf().any()


class NamedDevice(Message):
    def __init__(self):
        super().__init__()
        self.device, self.dtype = WHERE, torch.float32

    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j).to(self.device).to(self.dtype)


class GlobalDevice(Message):
    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j).to(WHERE)


class ByName(Message):
    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j).cpu().to("cpu")


@pytest.mark.parametrize("cls", [NamedDevice, GlobalDevice, ByName])
def test_names_of_the_device_of_the_rows(emulated, cls):
    x, ei, _ = arguments(Message)
    both(emulated, cls(), x, ei)


@pytest.mark.long
def test_devices_and_dtypes_may_become_others(emulated):
    x, ei, _ = arguments(Message)
    layer = NamedDevice()
    both(emulated, layer, x, ei)
    layer.dtype = torch.float64
    with emulated.on(on_fallback="native"):
        assert layer(x, ei).dtype == torch.float64
    layer.device, layer.dtype = "meta", torch.float32
    for _ in range(2):
        with emulated.on(on_fallback="native"):
            assert layer(x, ei).device.type == "meta"


class ByParameter(Message):
    """A parameter tells the device, and nothing else."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def message(self, x_i, x_j):
        return torch.tanh(x_i - x_j).to(self.nothing.device)


@pytest.mark.long
def test_a_parameter_that_moved(emulated):
    x, ei, _ = arguments(Message)
    layer = ByParameter()
    both(emulated, layer, x, ei)
    layer.nothing = nn.Parameter(torch.empty(0, device="meta"))
    for _ in range(2):
        with emulated.on(on_fallback="native"):
            assert layer(x, ei).device.type == "meta"


def test_where_devices_are():
    cpu, given = torch.device("cpu"), {"x": torch.ones(2), "w": torch.ones(2, device="meta")}
    assert devices.here((cpu, lambda kwargs: kwargs["x"]), given, (("x", "j"),), ())
    assert not devices.here((torch.device("cuda"),), given, (("x", "j"),), ())
    assert not devices.here((cpu,), given, (("x", "j"),), ("w",))
    assert not devices.here((lambda kwargs: kwargs["w"],), given, (("x", "j"),), ())


@pytest.mark.long
def test_numbers_may_become_others(emulated):
    x, ei, _ = arguments(Message)
    layer = RadialBasis()
    both(emulated, layer, x, ei)
    layer.cutoff = 5.0
    both(emulated, layer, x, ei)


class Noisy(Message):
    def message(self, x_i, x_j):
        noise = 0.1 * torch.randn_like(x_j)
        return torch.tanh(x_j - x_i + noise) * torch.rand_like(x_i[:, :1])


@pytest.mark.long
def test_numbers_drawn_for_each_edge(emulated):
    x, ei, _ = arguments(Message)
    layer, found = Noisy(), []
    for on in (False, True, True):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        if on:
            with emulated.on():
                out = layer(given, ei)
        else:
            out = layer(given, ei)
        out.square().sum().backward()
        found.append((out, given.grad, torch.rand(3)))
    for got in found[1:]:
        assert all(close(a, b) for a, b in zip(got, found[0]))


class Doubled(Message):
    """Rows in another dtype between."""

    def message(self, x_i, x_j):
        return torch.zeros_like(x_j, dtype=torch.float64).add(x_j).float()


class Changing(Message):
    """A constant that is written to."""

    def message(self, x_i, x_j):
        weights = torch.zeros(WIDTH)
        weights[1:4] = 2.0
        return torch.tanh(x_i - x_j) * weights


class Copied(Message):
    def message(self, x_i, x_j):
        out = x_j.to("cpu", copy=True)
        out[:, 0] = x_i[:, 0]
        return out + x_j


@pytest.mark.parametrize("cls", [Doubled, Changing, Copied])
def test_what_stays_native(emulated, cls):
    stays_native(emulated, cls())


class FilledAsArguments(Message):
    """Numbers that the dtype of an argument makes other ones."""

    def message(self, x_j, edge_attr):
        return x_j * torch.full_like(edge_attr, 2.5).view(-1, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_numbers_like_arguments_are_of_their_dtype(emulated, dtype):
    x, ei, _ = arguments(Message)
    for seed in range(2):
        both(emulated, FilledAsArguments(), x + seed, ei, torch.ones(ei.shape[1]).to(dtype),
             on_fallback="native")
