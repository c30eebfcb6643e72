"""Adam's steps in one kernel: the numbers, the state and the options of torch's own."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gnnaccel
from gnnaccel.adapters.captured import modules, optimizers

if not hasattr(torch, "_fused_adam_"):
    pytest.skip("this torch has no fused Adam", allow_module_level=True)
try:  # of a torch whose kernel takes CUDA tensors alone
    _one = torch.zeros(1)
    torch._fused_adam_([_one], [_one], [_one], [_one], [], [_one], lr=1.0, beta1=0.9, beta2=0.9,
                       weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False)
except (RuntimeError, NotImplementedError):
    pytest.skip("this torch has no fused Adam on a CPU", allow_module_level=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the parameters are; the kernel runs on a CPU as well."""
    monkeypatch.setattr(modules, "DEVICES", {request.param})
    return request.param


@pytest.fixture
def counted(monkeypatch):
    """How often the kernel ran."""
    runs = []

    def counting(run):
        return lambda *lists, **options: (runs.append(1), run(*lists, **options))[1]

    for name in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    return runs


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(model, optimizer, steps: int = 6, seed: int = 1) -> None:
    device = next(model.parameters()).device
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(20, 5).to(device)).square().sum().backward()
        optimizer.step()


def close(found, expected, exact, slack: float = 2e-7) -> None:
    """Each number at most twice as far from fp64's as torch's own is."""
    for one, two, three in zip(found, expected, exact):
        scale = three.abs().max().item()
        theirs = (two.double() - three).abs().max().item()
        assert (one.double() - three).abs().max().item() <= 2 * theirs + slack * scale


def kept(optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()
            if value.dim()]


@pytest.mark.parametrize("cls, options", [
    (torch.optim.Adam, {}), (torch.optim.Adam, dict(weight_decay=0.1, betas=(0.8, 0.9))),
    (torch.optim.Adam, dict(amsgrad=True)), (torch.optim.Adam, dict(maximize=True, eps=1e-3)),
    (torch.optim.AdamW, {}), (torch.optim.AdamW, dict(weight_decay=0.3, amsgrad=True))])
def test_the_numbers_are_torchs(device, counted, cls, options):
    found, expected, exact = (net().to(device) for _ in range(3))
    exact.double()
    ours, theirs, wide = (cls(m.parameters(), lr=0.02, **options) for m in (found, expected, exact))
    torch.manual_seed(1)
    rows = [torch.randn(20, 5, dtype=torch.float64).to(device) for _ in range(6)]
    for model, optimizer in ((exact, wide), (expected, theirs), (found, ours)):
        with gnnaccel.enabled(capture=model is found):
            for x in rows:
                optimizer.zero_grad()
                model(x.to(model[0].weight.dtype)).square().sum().backward()
                optimizer.step()
    assert len(counted) == (6 if "adam" in vars(optimizers.of_adam) else 0)
    # torch's kernel computes in fp32; its 1 - beta2 is 1.3e-5 of itself off, and so are squares
    close(found.parameters(), expected.parameters(), exact.parameters(), slack=2e-6)
    close(kept(ours), kept(theirs), kept(wide), slack=2e-5)


@pytest.mark.parametrize("cls, options", [
    (torch.optim.Adam, dict(amsgrad=True, eps=1e-3)), (torch.optim.AdamW, dict(weight_decay=0.3))])
def test_the_numbers_are_the_same_as_of_fused(device, counted, cls, options):
    model, other = net().to(device), net().to(device)
    ours = cls(model.parameters(), lr=0.02, **options)
    theirs = cls(other.parameters(), lr=0.02, fused=True, **options)
    with gnnaccel.enabled(capture=True):
        trained(model, ours)
    trained(other, theirs)
    assert len(counted) == 12
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(map(torch.equal, kept(ours), kept(theirs)))


def test_the_state_is_torchs(device, counted):
    """It is saved and loaded as ever, and steps with and without the kernel go on from each
    other."""
    model, other = net().to(device), net().to(device)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.02) for m in (model, other))
    with gnnaccel.enabled(capture=True):
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
    with gnnaccel.enabled(capture=True):
        trained(model, fresh, 2, 5)
    trained(model, fresh, 2, 6)
    trained(other, theirs, 2, 5), trained(other, theirs, 2, 6)
    assert len(counted) == 8
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.allclose(one, two, atol=1e-5)


def frozen(model):
    return torch.optim.Adam([{"params": model[0].parameters()},
                             {"params": model[2].parameters(), "lr": 0.1}])


@pytest.mark.parametrize("make, runs", [
    (frozen, 12),
    (lambda m: torch.optim.Adam(m.parameters(), foreach=True), 0),
    (lambda m: torch.optim.Adam(m.parameters(), foreach=False), 0),
    (lambda m: torch.optim.Adam(m.parameters(), fused=False), 0),
    (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)), 0),
    (lambda m: torch.optim.SGD(m.parameters(), 0.01), 0)])
def test_which_optimizers(device, counted, make, runs):
    model, other = net().to(device), net().to(device)
    ours, theirs = make(model), make(other)
    with gnnaccel.enabled(capture=True):
        trained(model, ours)
    assert len(counted) == runs
    trained(other, theirs)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.allclose(one, two, atol=1e-5)


def test_what_is_no_case_for_the_kernel(device, counted):
    """Parameters of several types, with strides of their own, or with other steps behind them."""
    for change in (lambda m: m[2].double(), lambda m: m[2].to(torch.bfloat16),
                   lambda m: setattr(m[0], "weight", nn.Parameter(
                       torch.randn(5, 7, device=device).t()))):
        models = [net().to(device) for _ in range(2)]
        for model in models:
            torch.manual_seed(3)
            change(model)
        given = [torch.optim.Adam(m.parameters(), 0.1) for m in models]
        for model, optimizer, capture in zip(models, given, (True, False)):
            with gnnaccel.enabled(capture=capture):
                for number in range(3):
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 0.1 + number)
                    optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models)))
    assert not counted
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with gnnaccel.enabled(capture=True):
        model[0](torch.ones(2, 5, device=device)).sum().backward()
        optimizer.step()  # of two parameters
        assert len(counted) == 1
        trained(model, optimizer, 1)  # of four, two of them for the first time
    assert len(counted) == 1
    assert [state["step"].item() for state in optimizer.state.values()] == [2, 2, 1, 1]


def test_the_option_ends(device, counted):
    before = optimizers.of_adam.adam
    model = net().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with gnnaccel.enabled(capture=True):
        trained(model, optimizer, 1)
    assert optimizers.of_adam.adam is before
    with gnnaccel.enabled():
        trained(model, optimizer, 1)
    assert len(counted) == 1
