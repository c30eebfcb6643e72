"""What scripts may rely on around torch's and PyG's `Linear`, and maps of many rows have to keep."""
from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import Linear

import gnnaccel
from gnnaccel.adapters import linear
from gnnaccel.dispatch.run import skinny_matmul
from tests.helpers import assert_accurate
from tests.test_linear_maps import CLASSES, ROWS, device, gradients, rows, runs, used  # noqa: F401


def both(module, x, grad, function=None):
    """Results and gradients as `gradients` gives them: ours, the host's, the host's in fp64."""
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, x.detach().double().requires_grad_(x.requires_grad), grad.double())
    with gnnaccel.disabled():
        host = gradients(module, x, grad)
    return gradients(module, x, grad, function), host, exact


# --- gradients ------------------------------------------------------------------------------------

@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("of_rows", [True, False])
def test_gradients_have_the_parameters_strides(device, columns, of_rows):
    """Scripts view them as one vector."""
    x, grad = rows(device, columns).requires_grad_(of_rows), rows(device, 40)
    module = used(nn.Linear(columns, 40).to(device), x)
    found = both(module, x, grad)
    for a, h, e in zip(*found):
        assert_accurate("gradient", a, h, e)
        assert a.stride() == h.stride()
    assert runs() == 1


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_gradient_may_be_written_to_while_the_other_is_kept(device, of_rows):
    x = rows(device).requires_grad_(of_rows)
    module = used(nn.Linear(32, 40).to(device), x)
    module(x).square().sum().backward()
    for kept, written in (("weight", "bias"), ("bias", "weight")):
        kept, written = (module.get_parameter(name).grad for name in (kept, written))
        factor = torch.ones_like(kept, requires_grad=True)
        product = (kept * factor).sum()
        written.zero_()
        product.backward()
        assert torch.equal(factor.grad, kept)
    assert runs() == 1


@CLASSES
@pytest.mark.parametrize("again", [False, True])
def test_memory_that_is_exchanged_before_backward(device, cls, again):
    """The host's gradient of rows is by the weight of forward, that of the weight by the rows that
    are there in backward, in any order of memory."""
    x, grad = rows(device).requires_grad_(), rows(device, 40)
    module = used(cls(32, 40).to(device), x)

    def exchanged(weight, given, module, x, grad):
        out = module(x)
        module.weight.data, x.data = weight, given
        wanted = [x, module.weight, module.bias]
        found = torch.autograd.grad(out, wanted, grad.clone().requires_grad_(again),
                                    create_graph=again)
        return [one.detach() for one in found]

    others = rows(device, 40, 32).t(), rows(device, ROWS, 32).t()
    wide = copy.deepcopy(module).double()
    exact = exchanged(*[t.double() for t in others], wide,
                      x.detach().double().requires_grad_(), grad.double())
    native, given = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with gnnaccel.disabled():
        host = exchanged(*others, native, given, grad)
    for a, h, e in zip(exchanged(*others, module, x, grad), host, exact):
        assert_accurate("exchanged", a, h, e)
    assert runs() == 1


# --- what is saved --------------------------------------------------------------------------------

@CLASSES
@pytest.mark.parametrize("columns", [32, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(device, cls, columns, bias, reentrant):
    """Both runs of a map save the same, whether rows of their number came before or not."""
    x, grad = rows(device).requires_grad_(), rows(device, columns)
    module = cls(32, columns, bias=bias).to(device)

    def repeated(x):
        return checkpoint(module, x, use_reentrant=reentrant)

    def forgotten(x):
        out = repeated(x)
        skinny_matmul._whole.cache_clear()
        return out

    def by_backward(module, x, function):
        out = function(x)
        out.backward(grad.to(out.dtype))
        found = [out, x.grad, *[p.grad for p in module.parameters()]]
        for t in (x, *module.parameters()):
            t.grad = None
        return found

    wide = copy.deepcopy(module).double()
    exact = by_backward(wide, x.detach().double().requires_grad_(), wide)
    with gnnaccel.disabled():
        host = by_backward(module, x, module)
    for function in (repeated, repeated, forgotten):
        for a, h, e in zip(by_backward(module, x, function), host, exact):
            assert_accurate("repeated", a, h, e)


@CLASSES
def test_saved_tensors_that_hooks_give_back_otherwise(device, cls):
    x, grad = rows(device).requires_grad_(), rows(device, 40)
    module = used(cls(32, 40).to(device), x)

    def hooked(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().t().contiguous(),
                                                      lambda t: t.t()):
            return module(x)

    for a, h, e in zip(*both(module, x, grad, hooked)):
        assert_accurate("hooked", a, h, e)


@CLASSES
def test_inference_tensors(device, cls):
    with torch.inference_mode():
        x = rows(device)
        module = used(cls(32, 40).to(device), x)
        expected = F.linear(x, module.weight, module.bias)
    assert_accurate("outside", module(x), expected, expected)
    with torch.inference_mode():
        assert module(x).is_inference() and runs() == 1


# --- what forward reads ---------------------------------------------------------------------------

@CLASSES
def test_biases_in_any_memory(device, cls):
    x, grad = rows(device).requires_grad_(), rows(device, 40)
    module = used(cls(32, 40).to(device), x)
    long, one = torch.randn(80, device=device), torch.randn(1, device=device)
    for bias in (long[::2], long[1:41], one.expand(40), one, one[0]):
        module.bias = nn.Parameter(bias)
        assert_accurate("result", module(x), F.linear(x, module.weight, bias),
                        F.linear(x.double(), module.weight.double(), bias.double()))
    module.bias = nn.Parameter(long[::2])
    for a, h, e in zip(*both(module, x, grad)):
        assert_accurate("gradient", a, h, e)


class Rounded(nn.Linear):
    @property
    def weight(self):
        return self._parameters["weight"].round()


class Scaled(Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return 2 * found if name == "weight" and hasattr(found, "grad") else found


@CLASSES
def test_weights_that_a_class_makes(device, cls):
    """A class may be exchanged after the parameters were made."""
    x = rows(device)
    module = used(cls(32, 40).to(device), x)
    weight = module.weight
    module.__class__, made = {nn.Linear: (Rounded, weight.round()), Linear: (Scaled, 2 * weight)}[cls]
    assert torch.equal(used(module, x)(x), F.linear(x, made, module.bias)) and runs() == 0


@CLASSES
def test_without_kernels_nothing_is_counted(device, cls):
    """Nor is anybody told of a fallback, who never asked for these maps."""
    x = rows(device)
    with gnnaccel.enabled(backend="torch", on_fallback="raise"):
        used(cls(32, 40).to(device), x)(x)
    assert "torch.linear" not in gnnaccel.stats()


@CLASSES
def test_sparse_weights(device, cls):
    x = rows(device)
    module = used(cls(32, 40).to(device), x)
    dense = module.weight.detach()
    module.weight = nn.Parameter(dense.to_sparse_csr(), requires_grad=False)
    expected = F.linear(x, dense, module.bias)
    assert_accurate("sparse", module(x), expected, expected)


def test_objects_that_are_no_modules(device):
    module, x = nn.Linear(32, 40).to(device), rows(device)
    other = types.SimpleNamespace(weight=module.weight, bias=module.bias)
    assert torch.equal(nn.Linear.forward(other, x), F.linear(x, module.weight, module.bias))


def test_a_hook_of_the_older_kind_gets_what_torchs_node_has(device):
    x = rows(device).requires_grad_()
    module, seen = used(nn.Linear(32, 40).to(device), x), []
    module.register_backward_hook(
        lambda module, given, grads: seen.append([tuple(t.shape) for t in given]))
    module(x).sum().backward()
    with gnnaccel.disabled():
        module(x).sum().backward()
    assert seen[0] == seen[1]


def test_a_script_has_a_map_of_its_own(device, monkeypatch):
    x = rows(device)
    module = used(nn.Linear(32, 40).to(device), x)
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x[:, :1])
    assert torch.equal(module(x), x[:, :1])


@CLASSES
def test_a_script_has_replaced_forward_before(monkeypatch, cls):
    from tests.routes import opened

    for name in ("MANY", "_MANY_OF_WEIGHT", "LEAST"):
        monkeypatch.setattr(linear, name, 1)
    monkeypatch.setattr(cls, "forward", lambda self, x: x[:, :1])
    module, x = cls(32, 40), torch.randn(ROWS, 32)
    with opened("emulated"), gnnaccel.enabled(when="supported"):
        linear._large_graph()
        for _ in range(2):
            assert torch.equal(module(x), x[:, :1])
