"""What is compared of a module that a message calls: all that its result depends on."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.layer.traced_modules import Looks


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Embedding(5, 3, max_norm=1.0), nn.Identity(),
                         nn.Sequential(nn.LayerNorm(3), nn.ReLU()))


def swapped(module) -> None:
    first, *rest = module._modules.items()
    module._modules.clear()
    module._modules.update([*rest, first])


def moved(tensor, **to) -> None:
    tensor.data = tensor.data.to(**to)


CHANGES = {
    "option": lambda m: setattr(m[1], "negative_slope", 0.2),
    "option that was none": lambda m: setattr(m[2], "padding_idx", 3),
    "option of another kind": lambda m: setattr(m[4][0], "normalized_shape", [3]),
    "option that is a tensor": lambda m: setattr(m[1], "negative_slope", torch.ones(3)),
    "option of another type": lambda m: setattr(m[2], "max_norm", 1),
    "option that is gone": lambda m: delattr(m[1], "negative_slope"),
    "one more option": lambda m: setattr(m[1], "scale", 2.0),
    "attribute that becomes an option": lambda m: setattr(m[3], "held", 2.0),
    "training": lambda m: m[4].eval(),
    "hook": lambda m: m[3].register_forward_hook(lambda *args: None),
    "hook before": lambda m: m[4][1].register_forward_pre_hook(lambda *args: None),
    "forward": lambda m: setattr(m[0], "forward", m[0].forward),
    "class": lambda m: setattr(m[1], "__class__", nn.ReLU),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "no parameter": lambda m: setattr(m[0], "bias", None),
    "shape": lambda m: setattr(m[4][0].weight, "data", torch.ones(1)),
    "dtype": lambda m: moved(m[4][0].weight, dtype=torch.float64),
    "module": lambda m: m.__setitem__(1, nn.ReLU()),
    "no module": lambda m: m._modules.__setitem__("1", None),
    "one more module": lambda m: m.append(nn.Identity()),
    "module inside": lambda m: m[4].__setitem__(1, nn.Tanh()),
    "order": swapped,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_seen(change):
    module = network()
    module[3].held = SimpleNamespace()
    looks, seen = Looks(module), guarded.seen(module)
    assert looks.holds(module) and guarded.still(module, seen)
    CHANGES[change](module)
    assert not looks.holds(module) and not guarded.still(module, seen)
    assert Looks(module).holds(module)


def test_a_forward_of_the_class_that_is_replaced(monkeypatch):
    module = network()
    looks = Looks(module)
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    assert not looks.holds(module)


def test_what_is_the_same():
    module = network()
    looks = Looks(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    module[0].weight.grad = torch.ones(3, 4)
    module.requires_grad_(False)
    module[1].negative_slope = float("0.1")
    assert looks.holds(module)


def test_tensors():
    t = nn.Parameter(torch.ones(3, 2))
    seen = guarded.seen(t)
    assert guarded.still(t, seen)
    assert not guarded.still(nn.Parameter(torch.ones(3, 2)), seen)
    moved(t, dtype=torch.float64)
    assert not guarded.still(t, seen)
    t.data = torch.ones(3)
    assert not guarded.still(t, seen)
