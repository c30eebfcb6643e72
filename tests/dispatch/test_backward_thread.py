"""The thread in which backward runs: the caller's where a process uses one GPU, autograd's own
otherwise."""
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel.adapters import autograd


def _threads(device: str, backward) -> set[int]:
    """The threads in which hooks of a small graph of autograd run."""
    seen: set[int] = set()
    x = torch.ones(3, device=device, requires_grad=True)
    y = (x * 2).exp()
    y.register_hook(lambda grad: seen.add(threading.get_ident()))
    x.register_hook(lambda grad: seen.add(threading.get_ident()))
    backward(y.sum(), x)
    return seen


def _by_backward(loss, x):
    loss.backward()


def _by_grad(loss, x):
    torch.autograd.grad(loss, x)


@pytest.fixture
def as_if_gpu(monkeypatch):
    """Decides as for a graph on a single GPU, and notes what the engine was told."""
    told: list[bool] = []
    native = torch.autograd._engine_run_backward

    def run(*args, **kwargs):
        told.append(torch._C._is_multithreading_enabled())
        return native(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
    monkeypatch.setattr(autograd, "_gpu_of", lambda outputs: 0)
    monkeypatch.setattr(autograd, "_single_gpu", lambda torch, own: True)
    return told


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [_by_backward, _by_grad])
def test_on_one_gpu_it_is_the_callers(backward):
    here = threading.get_ident()
    if torch.cuda.device_count() > 1:
        pytest.skip("other processes' tests may use the other GPUs of this one")
    assert here not in _threads("cuda", backward)
    with gnnaccel.enabled():
        assert _threads("cuda", backward) == {here}
        with gnnaccel.disabled():
            assert here not in _threads("cuda", backward)
    with gnnaccel.enabled(backward="workers"):
        assert here not in _threads("cuda", backward)
    assert torch._C._is_multithreading_enabled()


@pytest.mark.gpu
def test_gradients_on_one_gpu_are_the_same():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(),
                                torch.nn.Linear(16, 4)).cuda()
    x = torch.randn(64, 16, device="cuda", requires_grad=True)
    found = []
    for _ in range(2):
        loss = checkpoint(model, x, use_reentrant=len(found) == 0).square().sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())) if found else None)
        if found[0] is None:
            loss.backward()
            found[0] = [p.grad.clone() for p in model.parameters()]
    with gnnaccel.enabled():
        model.zero_grad()
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
        for p, *others in zip(model.parameters(), *found):
            for other in others:
                torch.testing.assert_close(p.grad, other)


@pytest.mark.parametrize("backward", [_by_backward, _by_grad])
def test_what_the_engine_is_told(as_if_gpu, backward):
    _threads("cpu", backward)
    with gnnaccel.enabled():
        _threads("cpu", backward)
        with gnnaccel.disabled():
            _threads("cpu", backward)
        with gnnaccel.enabled(backward="workers"):
            _threads("cpu", backward)
        _threads("cpu", backward)
    _threads("cpu", backward)
    assert as_if_gpu == [True, False, True, True, False, True]
    assert torch._C._is_multithreading_enabled()


def test_a_users_own_setting_stands(as_if_gpu):
    with gnnaccel.enabled(), torch.autograd.set_multithreading_enabled(False):
        _threads("cpu", _by_backward)
        assert not torch._C._is_multithreading_enabled()
    assert as_if_gpu == [False] and torch._C._is_multithreading_enabled()


def test_a_failing_backward_leaves_the_setting_as_it_was(as_if_gpu):
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def fail(grad):
        raise RuntimeError("a hook failed")

    y.register_hook(fail)
    with gnnaccel.enabled(), pytest.raises(RuntimeError, match="a hook failed"):
        y.sum().backward()
    assert as_if_gpu == [False] and torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside(as_if_gpu, reentrant):
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def run():
        inner = checkpoint(lambda t: (t @ weight).tanh(), x, use_reentrant=reentrant)
        checkpoint(lambda t: (t @ weight).exp(), inner, use_reentrant=reentrant).sum().backward()
        found, weight.grad, x.grad = (weight.grad, x.grad), None, None
        return found

    expected = run()
    with gnnaccel.enabled():
        for got, want in zip(run(), expected):
            torch.testing.assert_close(got, want)
    assert False in as_if_gpu


def test_graphs_on_the_cpu_are_left_to_torch(monkeypatch):
    told = []
    native = torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward",
                        lambda *a,
                        **k: (told.append(torch._C._is_multithreading_enabled()),
                              native(*a, **k))[1])
    with gnnaccel.enabled():
        _threads("cpu", _by_backward)
    assert told == [True]


#: torch's functions that are replaced besides
OTHERS = ["torch.optim.adam.adam", "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
          "torch.utils.checkpoint.CheckpointFunction.forward", "torch.jit.script"]


def replaced() -> list[str]:
    """torch's functions that are replaced; not forwards of modules that other tests made or traced, nor
    the constructor, which stays replaced where torch.compile ran before."""
    return [name for name in gnnaccel.status()["hosts"]["torch"]["patched"]
            if name.startswith("torch.") and not name.endswith("Module.__init__")
            and "GraphModuleImpl" not in name]


def test_it_is_replaced_and_put_back():
    native = torch.autograd._engine_run_backward
    with gnnaccel.enabled():
        assert torch.autograd._engine_run_backward.__wrapped__ is native
        assert replaced() == ["torch.autograd._engine_run_backward", *OTHERS]
    assert torch.autograd._engine_run_backward is native


def test_a_torch_without_that_entry_is_left_alone(monkeypatch):
    native = torch.autograd._engine_run_backward
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    with gnnaccel.enabled():
        assert replaced() == OTHERS
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", native, raising=False)
