"""Sequences of linear maps with activations between, of many rows: `torch.nn.Sequential`."""
from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.adapters import linear, sequences
from gnnaccel.dispatch.run import skinny_matmul
from tests.helpers import assert_accurate
from tests.test_linear_maps import device, rows, runs, used  # noqa: F401  # a fixture


def net(*modules: nn.Module, like: torch.Tensor) -> nn.Sequential:
    """The sequence, after a call with as many rows."""
    return used(nn.Sequential(*modules).to(like.device), like)


def checked(module: nn.Module, x: torch.Tensor, expected: int) -> None:
    """The result and all gradients against torch's in fp64; by so many kernels."""
    def both(module, x):
        out = module(x)
        wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
        return [out, *torch.autograd.grad(out, wanted, grad.to(out.dtype)[:, :out.shape[1]])]

    grad = rows(x.device, 128)

    exact = both(copy.deepcopy(module).double(), x.detach().double().requires_grad_(x.requires_grad))
    with gnnaccel.disabled():
        host = both(module, x)
    before = runs()
    ours = both(module, x)
    assert runs() - before == expected and len(ours) == len(exact)
    for at, (a, h, e) in enumerate(zip(ours, host, exact)):
        assert_accurate(f"{at}", a, h, e)


ACTIVATIONS = [nn.SiLU(), nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.LeakyReLU(.2),
               nn.ELU(), nn.Softplus(), nn.Sigmoid(), nn.Hardtanh(-.5, .5)]


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("of_rows", [True, False])
def test_two_maps_are_one(device, act, of_rows):
    x = rows(device).requires_grad_(of_rows)
    checked(net(nn.Linear(32, 16), act, nn.Linear(16, 32), like=x), x, 1)


def test_longer_sequences(device):
    """The first two maps as one, the third of an activation; other modules in their order."""
    x = rows(device).requires_grad_()
    modules = [nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)]
    checked(net(*modules, like=x), x, 2)
    checked(net(*modules, nn.ReLU(), like=x), x, 2)
    checked(net(nn.LayerNorm(32), *modules[:3], nn.LayerNorm(32), *modules[1:], like=x), x, 3)
    checked(net(nn.Sequential(*modules[:3]), nn.ReLU(), *modules[2:], like=x), x, 3)
    checked(net(nn.Tanh(), nn.Linear(32, 16), like=x), x, 1)
    # one map is too wide for both to be one
    checked(net(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32), like=x), x, 2)


def test_what_the_modules_say_is_heeded(device):
    x = rows(device).requires_grad_()
    module = net(nn.Linear(32, 32), nn.LeakyReLU(.2), nn.Linear(32, 32), like=x)
    checked(module, x, 1)
    module[1].negative_slope = .7
    checked(module, x, 1)
    module[1] = nn.Dropout(.5)
    torch.manual_seed(1)
    out = module(x)
    with gnnaccel.disabled():
        torch.manual_seed(1)
        assert torch.equal(out == 0, module(x) == 0)
    module[1] = nn.Sequential(nn.ReLU())
    checked(module, x, 2)
    module[1] = nn.Softmax(-1)
    checked(module, x, 2)
    # a gradient of one number would be all rounding
    module[1] = nn.PReLU(device=x.device).requires_grad_(False)
    checked(module, x, 2)
    module[1] = nn.Sigmoid()
    checked(module, x, 1)
    module[0].weight.requires_grad_(False)
    checked(module, x, 2)
    module[2].bias = None
    checked(module, x, 2)


def test_who_watches_a_module_sees_its_calls(device):
    x, seen = rows(device), []
    module = net(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), like=x)
    for k, one in enumerate(module):
        handle = one.register_forward_hook(lambda *args: seen.append(args[-1]))
        module(x)
        handle.remove()
        assert len(seen) == k + 1
    module[1].forward = lambda x: x.cos()
    out = module(x)
    with gnnaccel.disabled():
        assert torch.allclose(out, module(x), atol=1e-5)


def test_a_function_that_is_replaced(device, monkeypatch):
    x = rows(device)
    module = net(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), like=x)
    module(x)
    monkeypatch.setattr(nn.functional, "silu", lambda x, inplace=False: x.cos())
    out = module(x)
    with gnnaccel.disabled():
        assert torch.allclose(out, module(x), atol=1e-5)


def test_rows_that_an_activation_changes(device):
    """In place, of the caller's rows, which it sees."""
    for first in ([], [nn.Identity()]):
        x = rows(device)
        module = net(*first, nn.ReLU(inplace=True), nn.Linear(32, 32), like=x.clone())
        module(x)
        assert x.min() == 0


def test_memory_that_data_is_set_to(device):
    """Before backward: a map's gradients are made of the weights that it read, torch keeps views of
    them, and of the rows that are there then."""
    def both(module, x):
        first, out = module(x).tanh().sum(), module(x).square().sum()
        for p in module.parameters():
            p.data = p.data * 2
        x.data = x.data.t().contiguous().t()
        wanted = [x, *module.parameters()]
        found = torch.autograd.grad(first, wanted, create_graph=True)
        return [*torch.autograd.grad(out, wanted), *found, *torch.autograd.grad(
            sum(t.square().sum() for t in found), wanted, allow_unused=True)]

    x = rows(device)
    module = net(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), like=x)
    twin, before = copy.deepcopy(module), runs()
    found = both(module, x.clone().requires_grad_())
    assert runs() - before == 2
    with gnnaccel.disabled():
        expected = both(twin, x.clone().requires_grad_())
    for a, b in zip(found, expected):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("of_rows", [True, False])
def test_gradients_of_weights_lie_as_weights_do(device, of_rows):
    x = rows(device).requires_grad_(of_rows)
    module = net(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 32), like=x)
    for grad in torch.autograd.grad(module(x).sum(), [*module.parameters()]):
        grad.view(-1)


def test_options_that_are_no_plain_numbers(device):
    """numpy's numbers, say; and the class may have the option."""
    x = rows(device).requires_grad_()
    module = net(nn.Linear(32, 32), nn.LeakyReLU(numpy.float64(.3)), nn.Linear(32, 32), like=x)
    checked(module, x, 2)
    module[1] = nn.LeakyReLU(torch.tensor(.3))
    with gnnaccel.disabled():
        expected = module(x)
    assert torch.allclose(module(x), expected, atol=1e-5)
    module[1] = nn.LeakyReLU()
    del module[1].negative_slope
    with pytest.raises(AttributeError):
        module(x)


def test_a_hook_of_the_map_before_sees_what_an_activation_changes(device):
    x, kept = rows(device), []
    module = net(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), like=x)
    module[0].register_forward_hook(lambda module, given, out: kept.append(out))
    module(x)
    assert kept[0].min() == 0


@pytest.mark.parametrize("act", [nn.ReLU(), nn.Tanh(), nn.SiLU()], ids=str)
def test_rows_may_be_changed_once_an_activation_read_them(device, act):
    """torch keeps what the first two gave, and of rows without gradients of all three."""
    def both(x, added):
        h = x * 1
        out = module(h)
        h += out if added else 1
        return torch.autograd.grad((h + out).square().sum(), wanted)

    x = rows(device)
    module = net(act, nn.Linear(32, 32), like=x)
    wanted = [*module.parameters()]
    for added in (False, True):
        x.requires_grad_(added and type(act) is not nn.SiLU)
        before = runs()
        found = [both(x, added) for _ in range(8)]
        assert runs() - before == 8
        with gnnaccel.disabled():
            expected = both(x, added)
        for a, b in zip([*found[0], *found[-1]], [*expected, *expected]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_opting_out(device):
    x = rows(device)
    module = net(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), like=x)
    for out in (nn.Linear, module, module[1], module[2]):
        gnnaccel.exclude(out)
        before = runs()
        module(x)
        assert runs() - before == (out is module[1]) * 2 + (out is module[2])
        gnnaccel.reset_rules()


def test_second_derivatives(device):
    x = rows(device).requires_grad_()
    module = net(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), like=x)

    def twice(module, x):
        first, = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()],
                                   allow_unused=True)

    exact = twice(copy.deepcopy(module).double(), x.detach().double().requires_grad_())
    with gnnaccel.disabled():
        host = twice(module, x)
    for a, h, e in zip(twice(module, x), host, exact):
        assert (a is None) == (e is None)
        if a is not None:
            assert_accurate("twice", a, h, e)


def test_rows_that_do_not_come_again(device):
    """Nor does a call that asks about its maps in several ways."""
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).to(device)
    for count in range(70, 75):
        module(rows(device, count=count))
    assert runs() == 0
    module(rows(device, count=74))
    assert runs() == 1


@pytest.mark.long
def test_left_to_torch(device):
    x = rows(device)
    module = net(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), like=x)
    with torch.autocast(device.type, torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
    assert module(x.view(7, 11, 32)).shape == (7, 11, 32)
    torch.func.vmap(module)(x.view(1, 77, 32))
    torch.jit.script(module)(x)
    torch.jit.trace(module, x, check_trace=False)
    torch.compile(module, backend="eager", fullgraph=True)(x)
    copy.deepcopy(module).double()(x.double())
    few = net(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 8), like=x)
    skinny_matmul._whole.cache_clear()
    assert few(x).shape == (77, 8)
    assert runs() == 0
    with pytest.raises(RuntimeError):
        module(rows(device, 40))
    with pytest.raises(TypeError):
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(), None).to(device)(x)


def test_small_rows_are_not_looked_at(device, monkeypatch):
    monkeypatch.setattr(linear, "LEAST", 77 * 32 + 1)
    monkeypatch.setattr(sequences, "of_many", None)
    nn.Sequential(nn.Linear(32, 32), nn.ReLU()).to(device)(rows(device))


@pytest.mark.gpu
def test_captured_by_hand():
    """A captured sequence is the kernels', and reads what lies in memory when it is replayed."""
    with gnnaccel.enabled(first_use="wait"):
        linear._large_graph()
        x = torch.randn(700_000, 32, device="cuda", requires_grad=True)
        module = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32)).to("cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                module(x).square().sum().backward()
        torch.cuda.synchronize()
        gnnaccel.reset_stats()
        graph, wanted = torch.cuda.CUDAGraph(), [x, *module.parameters()]
        for t in wanted:
            t.grad = None
        with torch.cuda.graph(graph, stream=side):
            module(x).square().sum().backward()
        assert runs() == 1
        for _ in range(2):
            with torch.no_grad():
                for t in wanted:
                    t.normal_()
                    t.grad.zero_()
            graph.replay()
            wide = copy.deepcopy(module).double()
            for t in wide.parameters():
                t.grad = None
            x_wide = x.detach().double().requires_grad_()
            wide(x_wide).square().sum().backward()
            for t, w in zip(wanted, [x_wide, *wide.parameters()]):
                torch.testing.assert_close(t.grad.double(), w.grad, rtol=1e-4,
                                           atol=1e-5 * w.grad.abs().max().item())
