"""Adam's steps in one kernel: the numbers, the state and the options of torch's own."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import adam as of_adam

import gnnaccel
from gnnaccel.cuda.runtime import driver

OPTIONS = [
    (torch.optim.Adam, {}), (torch.optim.Adam, dict(weight_decay=0.1, betas=(0.8, 0.9))),
    (torch.optim.Adam, dict(amsgrad=True)), (torch.optim.Adam, dict(maximize=True, eps=1e-3)),
    (torch.optim.Adam, dict(betas=(0.3, 0.2), maximize=True, weight_decay=0.01)),
    (torch.optim.AdamW, {}), (torch.optim.AdamW, dict(weight_decay=0.3, amsgrad=True))]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the parameters are: the kernel is emulated, or on a GPU."""
    from tests.routes import opened

    with opened(request.param) as route:
        yield route.device


def enabled(device):
    """On a CPU the host's own code is as good; the kernel is asked for."""
    return gnnaccel.enabled(when="profitable" if device.type == "cuda" else "supported")


def runs() -> int:
    return gnnaccel.stats().get("torch.adam", {"routes": {}})["routes"].get("cuda", 0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(model, optimizer, steps: int = 6, seed: int = 1) -> None:
    parameter = next(model.parameters())
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        rows = torch.randn(20, 5, dtype=torch.float64).to(parameter.device, parameter.dtype)
        model(rows).square().sum().backward()
        optimizer.step()


def kept(optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


def close(found, expected, exact) -> None:
    """Each number at most twice as far from fp64's as torch's own is."""
    for one, two, three in zip(found, expected, exact):
        scale = three.abs().max().item()
        theirs = (two.double() - three).abs().max().item()
        assert (one.double() - three).abs().max().item() <= 2 * theirs + 2e-7 * scale


@pytest.mark.parametrize("cls, options", OPTIONS)
def test_the_numbers_are_torchs(device, cls, options):
    found, expected, exact = net().to(device), net().to(device), net().to(device).double()
    ours, theirs, wide = (cls(m.parameters(), lr=0.02, **options) for m in (found, expected, exact))
    gnnaccel.reset_stats()
    with enabled(device):
        trained(found, ours)
    trained(expected, theirs)
    trained(exact, wide)
    assert runs() == 6
    close(found.parameters(), expected.parameters(), exact.parameters())
    close(kept(ours), kept(theirs), kept(wide))


@pytest.mark.parametrize("cls, options", OPTIONS)
def test_one_step_rounds_as_torchs(device, cls, options):
    """Of given gradients, over many sizes: the same bits as ``foreach`` on a GPU."""
    torch.manual_seed(2)
    sizes = [(1,), (3, 5), (1024,), (1025,), (70, 33), (0, 4), (4096, 3)] + [(7,)] * 20
    start = [torch.randn(size, device=device) for size in sizes]
    steps = [[torch.randn_like(t) * 10.0 ** (at % 5 - 2) for at, t in enumerate(start)]
             for _ in range(3)]
    found = []
    for with_kernel in (True, False):
        weights = [nn.Parameter(t.clone()) for t in start]
        optimizer = cls(weights, lr=0.02, **options)
        with enabled(device) if with_kernel else gnnaccel.disabled():
            gnnaccel.reset_stats()
            for grads in steps:
                for weight, grad in zip(weights, grads):
                    weight.grad = grad.clone()
                optimizer.step()
            assert runs() == (3 if with_kernel else 0)
        found.append([*weights, *kept(optimizer)])
    for one, two in zip(*found):
        if device.type == "cuda":
            assert torch.equal(one, two)
        assert torch.allclose(one, two, rtol=2e-6, atol=1e-6)


def test_what_is_written_is_known_to_autograd(device):
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with enabled(device):
        out = model(torch.ones(2, 5, device=device))
        out.sum().backward(retain_graph=True)
        before = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > version for p, version in zip(model.parameters(), before))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_state_is_torchs(device):
    """It is saved and loaded as ever, and steps with and without the kernel go on from each
    other."""
    model, other = net().to(device), net().to(device)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.02) for m in (model, other))
    with enabled(device):
        trained(model, ours)
    trained(other, theirs)
    saved, expected = ours.state_dict(), theirs.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    for one, two in zip(saved["state"].values(), expected["state"].values()):
        assert {k: (v.device, v.dtype, v.shape) for k, v in one.items()} == {
            k: (v.device, v.dtype, v.shape) for k, v in two.items()}
        assert one["step"].item() == 6
    fresh = torch.optim.Adam(model.parameters(), lr=0.02)
    fresh.load_state_dict(copy.deepcopy(saved))
    with enabled(device):
        trained(model, fresh, 2, 5)
    trained(model, fresh, 2, 6)
    trained(other, theirs, 2, 5), trained(other, theirs, 2, 6)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.allclose(one, two, atol=1e-6)


def groups(model):
    return torch.optim.Adam([{"params": model[0].parameters()},
                             {"params": model[2].parameters(), "lr": 0.1}])


@pytest.mark.parametrize("make, count", [
    (groups, 12),
    (lambda m: torch.optim.Adam(m.parameters(), foreach=True), 0),
    (lambda m: torch.optim.Adam(m.parameters(), foreach=False), 0),
    (lambda m: torch.optim.Adam(m.parameters(), fused=False), 0),
    (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)), 0),
    (lambda m: torch.optim.SGD(m.parameters(), 0.01), 0)])
def test_which_optimizers(device, make, count):
    model, other = net().to(device), net().to(device)
    ours, theirs = make(model), make(other)
    gnnaccel.reset_stats()
    with enabled(device):
        trained(model, ours)
    assert runs() == count
    trained(other, theirs)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.allclose(one, two, atol=1e-6)


def test_what_is_no_case_for_the_kernel(device):
    """Parameters of several types, with strides of their own, or with other steps behind them."""
    gnnaccel.reset_stats()
    for change in (lambda m: m[2].double(), lambda m: m[2].to(torch.bfloat16),
                   lambda m: setattr(m[0], "weight", nn.Parameter(
                       torch.randn(5, 7, device=device).t()))):
        models = [net().to(device) for _ in range(2)]
        for model in models:
            torch.manual_seed(3)
            change(model)
        given = [torch.optim.Adam(m.parameters(), 0.1) for m in models]
        for model, optimizer, block in zip(models, given, (enabled(device), gnnaccel.disabled())):
            with block:
                for number in range(3):
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 0.1 + number)
                    optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models)))
    assert not runs()
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with enabled(device):
        model[0](torch.ones(2, 5, device=device)).sum().backward()
        optimizer.step()  # of two parameters
        assert runs() == 1
        trained(model, optimizer, 1)  # of four, two of them for the first time
    assert runs() == 1
    assert [state["step"].item() for state in optimizer.state.values()] == [2, 2, 1, 1]


@pytest.mark.parametrize("where", ["parameter", "gradient", "average"])
def test_views_that_negate_their_numbers(device, where):
    """Their memory holds the numbers' opposites."""
    if torch.device(device).type == "cuda" and where != "gradient":
        pytest.skip("torch's own steps take no such tensors on a GPU")
    found = []
    gnnaccel.reset_stats()
    for block in (enabled(device), gnnaccel.disabled()):
        given = torch.linspace(-1, 1, 6, device=device)
        weight = nn.Parameter(torch._neg_view(given) if where == "parameter" else given)
        optimizer = torch.optim.Adam([weight], 0.1)
        weight.grad = torch.arange(6.0, device=device)
        optimizer.step()
        if where == "gradient":
            weight.grad = torch._neg_view(weight.grad)
        elif where == "average":
            optimizer.state[weight]["exp_avg"] = torch._neg_view(optimizer.state[weight]["exp_avg"])
        with block:
            optimizer.step()
        found.append(weight.detach().clone())
    assert torch.equal(*found) and not runs()


def test_a_parameter_that_is_given_twice(device):
    """It has one state, and as many steps behind it as times that it was given."""
    found = []
    gnnaccel.reset_stats()
    for block in (enabled(device), gnnaccel.disabled()):
        weight = nn.Parameter(torch.ones(3, device=device))
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = torch.optim.Adam([weight, weight], 0.1, betas=(0.5, 0.9))
        with block:
            for _ in range(3):
                weight.grad = torch.arange(3.0, device=device)
                optimizer.step()
        found.append(weight.detach().clone())
    assert not runs()
    if device.type == "cpu":  # on a GPU, torch's own kernels race for it
        assert torch.equal(*found)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("other", ["parameter", "exp_avg", "exp_avg_sq", "another"])
def test_gradients_that_share_memory_with_what_is_written(device, cls, other):
    """torch decays a parameter before it reads the gradient."""
    found = []
    gnnaccel.reset_stats()
    for block in (enabled(device), gnnaccel.disabled()):
        weights = [nn.Parameter(torch.linspace(1, 2, 6, device=device) * n) for n in (1, 2)]
        optimizer = cls(weights, 0.1, weight_decay=0.5)
        for weight in weights:
            weight.grad = torch.arange(6.0, device=device)
        optimizer.step()
        weight = weights[0]
        weight.grad = (weights[other == "another"].detach() if other in ("parameter", "another")
                       else optimizer.state[weight][other])
        with block:
            optimizer.step()
        found.append([*weights, *kept(optimizer)])
    assert all(map(torch.equal, *found)) and not runs()


@pytest.mark.parametrize("what", ["parameter", "averages"])
def test_what_was_made_in_inference_mode(device, what):
    """Nobody may write to it outside of that mode: torch raises, with some of it done."""
    found = []
    for block in (enabled(device), gnnaccel.disabled()):
        with torch.inference_mode(what == "parameter"):
            weight = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.Adam([weight], 0.1)
        weight.grad = torch.arange(3.0, device=device)
        with block:
            if what == "averages":
                with torch.inference_mode():
                    optimizer.step()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                    optimizer.step()
        found.append([weight, *kept(optimizer)])
    assert all(map(torch.allclose, *found))


def test_on_a_cpu_torch_runs_unasked():
    assert not driver.placed()
    model = net()
    gnnaccel.reset_stats()
    with gnnaccel.enabled():
        trained(model, torch.optim.Adam(model.parameters()), 1)
    assert "torch.adam" not in gnnaccel.stats()


def test_it_ends_with_gnnaccel():
    before = of_adam.adam
    with gnnaccel.enabled():
        assert of_adam.adam is not before
    assert of_adam.adam is before


SIZES = [(3, 5), (1025,), (0, 4)] + [(7,)] * 20  # more than gradients whose addresses are arguments


def _half(weights, optimizer, number):
    """Others have no gradient."""
    for weight in weights[number % 2::2]:
        weight.grad = None


def _data(weights, optimizer, number):
    """Parameters in other memory, and one whose numbers are turned where they are."""
    for weight in weights:
        weight.data = weight.data.clone() * 0.5


def _turned(weights, optimizer, number):
    weights[-1].data = weights[-1].data.view(2, 2).t() if number == 2 else weights[-1].data


def _averages(weights, optimizer, number):
    for weight in weights:
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[weight]
            if number % 2:
                state[name] = state[name] * 0.5
            else:
                state[name].data = state[name].data * 0.5


def _negated(weights, optimizer, number):
    """Another tensor in the same place, whose numbers are the opposite ones."""
    if number == 3 and weights[0].device.type == "cpu":  # on a GPU torch's own steps take none
        state = optimizer.state[weights[1]]
        state["exp_avg"] = torch._neg_view(state["exp_avg"])


def _counts(weights, optimizer, number):
    """One of them starts anew."""
    if number == 2:
        optimizer.state[weights[3]]["step"] = torch.tensor(0.0)
    elif number == 4:
        optimizer.state[weights[3]]["step"].fill_(4.0)


def _one_count(weights, optimizer, number):
    """All have one tensor as their count, which torch then counts up for each."""
    step = optimizer.state[weights[0]]["step"]
    for weight in weights:
        optimizer.state[weight]["step"] = step


def _shared(weights, optimizer, number):
    """The gradient lies in a parameter that is written first."""
    if number == 3:
        weights[-2].grad = weights[-3].detach()


def _loaded(weights, optimizer, number):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _group(weights, optimizer, number):
    """A parameter more."""
    if number == 2:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, device=weights[0].device))]})
    for group in optimizer.param_groups[1:]:
        group["params"][0].grad = torch.full((4,), 0.5, device=weights[0].device)
        weights[3].grad.add_(group["params"][0].detach().sum())


def _another(weights, optimizer, number):
    """Another optimizer has the first of these parameters."""
    torch.optim.Adam(weights[:number], 0.3).step()


@pytest.mark.parametrize("change, least", [
    (_half, 6), (_data, 6), (_turned, 2), (_averages, 6), (_negated, 3), (_counts, 4), (_one_count, 1),
    (_shared, 5), (_loaded, 6), (_group, 6), (_another, 6)])
def test_what_changes_between_steps(device, change, least):
    """What was found out in earlier steps does not hold then."""
    found, ran = [], []
    for block in (enabled(device), gnnaccel.disabled()):
        torch.manual_seed(4)
        weights = [nn.Parameter(torch.randn(size, device=device)) for size in [*SIZES, (2, 2)]]
        optimizer = torch.optim.Adam(weights, 0.1)
        gnnaccel.reset_stats()
        with block:
            for number in range(6):
                for weight in weights:
                    weight.grad = torch.randn_like(weight)
                if number:
                    change(weights, optimizer, number)
                optimizer.step()
            ran.append(runs())
        found.append([*weights, *kept(optimizer)])
        counts = [state["step"].item() for state in optimizer.state.values()]
        found[-1].append(torch.tensor(counts))
    assert ran[0] >= least and not ran[1]
    for one, two in zip(*found):
        assert one.shape == two.shape and torch.allclose(one, two, rtol=2e-6, atol=1e-6)
