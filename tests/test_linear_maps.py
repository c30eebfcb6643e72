"""Linear maps of many rows: torch's and PyG's `Linear`, by kernels where rows come again."""
from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import Linear

import gnnaccel
from gnnaccel.adapters import linear
from gnnaccel.dispatch.run import skinny_matmul
from tests.helpers import assert_accurate

CLASSES = pytest.mark.parametrize("cls", [nn.Linear, Linear], ids=["torch", "pyg"])
ROWS = 77


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the rows are, with gnnaccel enabled: kernels are emulated, or on a GPU. All rows are
    many."""
    from tests.routes import opened

    for name in ("MANY", "_MANY_OF_WEIGHT", "LEAST"):
        monkeypatch.setattr(linear, name, 1)
    with opened(request.param) as route:
        on_gpu = route.device.type == "cuda"
        with gnnaccel.enabled(when="profitable" if on_gpu else "supported", first_use="wait"):
            linear._large_graph()
            gnnaccel.reset_stats()
            skinny_matmul._whole.cache_clear()
            yield route.device


def runs() -> int:
    return gnnaccel.stats().get("torch.linear", {"routes": {}})["routes"].get("cuda", 0)


def rows(device, k: int = 32, count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, k).to(device)


def used(module: nn.Module, x: torch.Tensor) -> nn.Module:
    """The module, after a call with as many rows."""
    with torch.no_grad():
        module(x)
    return module


def gradients(module, x, grad, function=None) -> list:
    inputs = [t for t in (x, *module.parameters()) if t.requires_grad]
    out = (function or module)(x)
    return [out, *torch.autograd.grad(out, inputs, grad)]


@CLASSES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("wide", [40, 192])
def test_results_and_gradients(device, cls, bias, of_rows, wide):
    x, grad = rows(device).requires_grad_(of_rows), rows(device, wide)
    module = used(cls(32, wide, bias=bias).to(device), x)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, x.detach().double().requires_grad_(of_rows), grad.double())
    host = gradients(module, x, grad, lambda x: F.linear(x, module.weight, module.bias))
    ours = gradients(module, x, grad)
    assert runs() == 1 and len(ours) == len(exact)
    for at, (a, h, e) in enumerate(zip(ours, host, exact)):
        assert_accurate(f"{at}", a, h, e)


@CLASSES
def test_rows_that_do_not_come_again(device, cls):
    """Mini-batches have other rows in each step; in one step several maps have the same."""
    modules = [cls(32, 32).to(device) for _ in range(3)]
    for count in range(70, 75):
        x = rows(device, count=count)
        for module in modules:
            x = module(x)
    assert runs() == 0
    for count in (70, 74):  # as before
        x = rows(device, count=count)
        for module in modules:
            assert_accurate("again", module(x), F.linear(x, module.weight, module.bias),
                            F.linear(x.double(), module.weight.double(), module.bias.double()))
    assert runs() == 6


@CLASSES
def test_weights_and_options_change(device, cls):
    """What is kept for a form is used with the present weights."""
    x = rows(device)
    module = used(cls(32, 32).to(device), x)
    before = module(x)
    with torch.no_grad():
        module.weight.neg_()
        module.bias.neg_()
    assert torch.equal(module(x), -before)
    module.weight.data = module.weight.data.clone().mul_(-1)
    module.bias = nn.Parameter(torch.zeros(32, device=device))
    assert not torch.equal(module(x), before)
    module.bias = None
    assert_accurate("no bias", module(x), F.linear(x, module.weight),
                    F.linear(x.double(), module.weight.double()))
    other = cls(32, 16).to(device)
    assert other(x).shape == (ROWS, 16) and runs() == 5


@CLASSES
def test_second_derivatives(device, cls):
    x = rows(device).requires_grad_()
    module = used(cls(32, 24).to(device), x)

    def twice(module, x):
        first, = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, module.weight])

    wide = copy.deepcopy(module).double()
    exact = twice(wide, x.detach().double().requires_grad_())
    with gnnaccel.disabled():
        host = twice(module, x)
    for a, h, e in zip(twice(module, x), host, exact):
        assert_accurate("twice", a, h, e)
    assert runs() == 1


@CLASSES
def test_opting_out(device, cls):
    x = rows(device)
    module = used(cls(32, 32).to(device), x)
    whole = nn.Sequential(module)
    for out in (lambda: gnnaccel.exclude(cls), lambda: gnnaccel.exclude(whole)):
        out()
        whole(x)
        gnnaccel.reset_rules()
    with gnnaccel.disabled():
        whole(x)
    assert runs() == 0
    whole(x)
    assert runs() == 1


@CLASSES
def test_what_is_left_to_torch(device, cls):
    x = rows(device)
    module = used(cls(32, 32).to(device), x)

    def same(found, *tensors):
        return torch.equal(found, F.linear(*tensors))

    weight, bias = module.weight, module.bias
    assert same(module(x.t().contiguous().t()), x.t().contiguous().t(), weight, bias)
    assert module(x.view(7, 11, 32)).shape == (7, 11, 32)
    with torch.autocast(device.type, torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    module(negative)
    torch.func.vmap(module)(x.view(1, ROWS, 32))
    torch.func.jvp(module, (x,), (x,))
    torch.jit.trace(module, x, check_trace=False)
    few = used(cls(8, 32).to(device), rows(device, 8))
    few(rows(device, 8))
    wide = used(cls(136, 8).to(device), rows(device, 136))
    wide(rows(device, 136))
    copy.deepcopy(module).double()(x.double())
    assert runs() == 0
    with pytest.raises(RuntimeError):
        module(rows(device, 40))
    with pytest.raises(TypeError):
        module([1.0])


def test_weights_that_are_made_in_each_call(device):
    """A spectral norm makes a step of its iteration for each look at the weight."""
    x = rows(device)
    for normed in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm,
                   nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        ours = normed(nn.Linear(32, 32)).to(device)
        native = copy.deepcopy(ours)
        for _ in range(3):
            found = ours(x)
            with gnnaccel.disabled():
                assert torch.equal(found, native(x))
    assert runs() == 0


@CLASSES
def test_hooks_copies_and_keywords(device, cls):
    x, seen = rows(device), []
    module = used(cls(32, 32).to(device), x)
    handle = module.register_forward_hook(lambda module, given, out: seen.append(out))
    out = module(**{"input" if cls is nn.Linear else "x": x})
    handle.remove()
    assert seen[0] is out and runs() == 1
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), out)
    found = torch.func.functional_call(module, {"weight": module.weight * 2}, (x,))
    assert_accurate("called with others", found, F.linear(x, module.weight * 2, module.bias),
                    F.linear(x.double(), module.weight.double() * 2, module.bias.double()))
    assert runs() == 4


@CLASSES
def test_compiled(device, cls):
    x = rows(device)
    module = used(cls(32, 32).to(device), x)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), F.linear(x, module.weight, module.bias))
    assert runs() == 0


def test_small_maps_are_not_looked_at(device, monkeypatch):
    monkeypatch.setattr(linear, "LEAST", ROWS * 32 + 1)
    monkeypatch.setattr(linear, "of_many", None)
    module = nn.Linear(32, 32).to(device)
    module(rows(device))


@pytest.mark.long
def test_no_class_is_replaced_before_a_large_graph_came(monkeypatch):
    """Nor after gnnaccel was enabled anew, unless the graph is still there."""
    from torch_geometric.nn import SAGEConv

    from gnnaccel.dispatch.graph import cache
    from tests.pyg import graphs
    from tests.routes import opened

    def replaced() -> list[bool]:
        return [hasattr(cls.forward, "__wrapped__") for cls in (nn.Linear, Linear)]

    def block(*edges: torch.Tensor) -> list[bool]:
        with gnnaccel.enabled(when="supported"):
            for edge_index in edges:
                SAGEConv(16, 16)(graphs.features(width=16), edge_index)
            return replaced()

    small, large = graphs.square(), graphs.square().repeat(1, 2)
    monkeypatch.setattr(cache, "LARGE", large.shape[1])
    with opened("emulated"):
        assert block(small) == [False, False] and block(large) == [True, True]
        assert replaced() == [False, False] and block() == [True, True]
        del large
        assert block(small) == [False, False]


@pytest.mark.gpu
def test_captured_by_hand():
    """A captured map is the kernels', and reads what lies in memory when it is replayed."""
    device = torch.device("cuda")
    with gnnaccel.enabled(first_use="wait"):
        linear._large_graph()
        x = torch.randn(400_000, 32, device=device, requires_grad=True)
        module = nn.Linear(32, 32).to(device)
        for _ in range(3):
            module(x).sum().backward()
        gnnaccel.reset_stats()
        graph = torch.cuda.CUDAGraph()
        x.grad = module.weight.grad = module.bias.grad = None
        with torch.cuda.graph(graph):
            out = module(x)
            out.square().sum().backward()
        assert runs() == 1
        skinny_matmul._whole.cache_clear()
        for _ in range(2):
            with torch.no_grad():
                x.normal_(), module.weight.normal_()
            x.grad.zero_(), module.weight.grad.zero_(), module.bias.grad.zero_()
            graph.replay()
            wide = copy.deepcopy(module).double()
            exact = F.linear(x.double(), wide.weight, wide.bias)
            by_weight, by_bias = torch.autograd.grad(exact.square().sum(), [wide.weight, wide.bias])
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(module.weight.grad.double(), by_weight, rtol=1e-4, atol=10.)
            torch.testing.assert_close(module.bias.grad.double(), by_bias, rtol=1e-4, atol=10.)
