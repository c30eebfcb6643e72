"""Edits of a model: its weights, options, submodules, methods and hooks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
import torch_geometric.nn as pyg
from torch import nn

from .edits import edit
from .trees import named, tree_map


@edit(5)
def weights_changed(h) -> str:
    found = list(h.model.named_parameters())
    if not found:
        return "none"
    name, p = h.choose.choice(found)
    path, _, last = name.rpartition(".")
    owner = h.model.get_submodule(path)

    def state() -> dict:
        return {
            k: torch.randn_like(v) if v.is_floating_point() else v
            for k, v in h.model.state_dict().items()
        }

    ways = {
        "replaced": lambda: setattr(owner, last, nn.Parameter(torch.randn_like(p))),
        "copy_": lambda: p.copy_(torch.randn_like(p)),
        "data set": lambda: setattr(p, "data", torch.randn_like(p)),
        "data": lambda: p.data.mul_(-1.5),
        "state": lambda: h.model.load_state_dict(state()),
        "state assigned": lambda: h.model.load_state_dict(state(), assign=True),
        "half and back": lambda: h.model.half().float(),
        "double and back": lambda: h.model.double().float(),
        "reset": lambda: h.model.reset_parameters(),
        "other strides": lambda: setattr(p, "data", p.data.t().contiguous().t()),
    }
    if h.device.type == "cpu":
        ways["numpy"] = lambda: p.detach().numpy().__imul__(0.5)
    way = h.choose.choice(sorted(ways))
    with torch.no_grad():
        ways[way]()
    return f"{way} {name}"


@edit(2)
def trained(h) -> str:
    parameters = [p for p in h.model.parameters() if p.requires_grad]
    if not parameters or not h.grad or h.autocast:
        return "no"
    kind = h.choose.choice((torch.optim.SGD, torch.optim.Adam))
    optimizer = kind(parameters, lr=0.05, foreach=h.choose.random() < 0.5)
    with h.backend.on(**h.options):
        sum(t.pow(2).mean() for t in named(h.call(h.model)).values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return kind.__name__


class LowRank(nn.Module):
    """What fine-tuning puts in the place of a linear map."""

    def __init__(self, base: nn.Module):
        super().__init__()
        device = base.weight.device
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_channels, device=device) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_channels, 2, device=device) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@edit(2)
def linear_map_replaced(h) -> str:
    slots = [(m, k, v) for m in h.model.modules() for k, v in m._modules.items()
             if type(v) is pyg.Linear]
    if not slots:
        return "none"
    owner, key, old = h.choose.choice(slots)
    plain = nn.Linear(old.in_channels, old.out_channels, bias=old.bias is not None).to(h.device)
    setattr(owner, key, LowRank(old) if h.choose.random() < 0.5 else plain)
    return f"{key} by {type(getattr(owner, key)).__name__}"


_OPTIONS = {
    "negative_slope": (0.1, 0.2, 0.7),
    "add_self_loops": (True, False),
    "dropout": (0.0, 0.0, 0.3),
    "improved": (True, False),
    "flow": ("source_to_target", "target_to_source"),
    "normalize": (True, False),
    "eps": (0.0, 0.5),
    "K": (1, 2, 3),
    "attention_type": ("MX", "SD"),
    "concat": (True, False),
}


def _layers(h) -> list:
    return [m for m in h.model.modules() if isinstance(m, pyg.MessagePassing)]


@edit(4)
def option_changed(h) -> str:
    layer = h.choose.choice(_layers(h) or [h.model])
    fixed = ("flow",) if h.edge == "types" else ()  # turned round, ids would be out of range
    choices = [(k, v) for k, values in _OPTIONS.items() if k not in fixed
               and isinstance(layer.__dict__.get(k), (bool, int, float, str)) for v in values]
    if not choices:
        return "none"
    name, value = h.choose.choice(choices)
    setattr(layer, name, value)
    return f"{type(layer).__name__}.{name} = {value}"


@edit(2)
def aggregation_changed(h) -> str:
    layers = [m for m in _layers(h) if hasattr(m, "aggr_module")
              and not isinstance(m.aggr_module, pyg.MultiAggregation)]
    if not layers:
        return "none"
    layer = h.choose.choice(layers)
    for name in ("t", "p"):
        if isinstance(getattr(layer.aggr_module, name, None), float) and h.choose.random() < 0.5:
            setattr(layer.aggr_module, name, h.choose.choice((0.5, 2.0, 3.0)))
            return name
    layer.aggr_module = h.choose.choice(
        (pyg.SumAggregation, pyg.MeanAggregation, pyg.MaxAggregation)
    )().to(h.device)
    return type(layer.aggr_module).__name__


def _doubled(function: Callable) -> Callable:
    @functools.wraps(function)
    def replacement(*args, **kwargs):
        return tree_map(lambda t: t * 2 if t.is_floating_point() else t, function(*args, **kwargs))

    return replacement


@edit(3)
def method_replaced_on_the_layer(h) -> str:
    layers = _layers(h)
    if not layers:
        return "none"
    layer = h.choose.choice(layers)
    name = h.choose.choice(("message", "aggregate", "update", "forward", "propagate"))
    if name in layer.__dict__:
        del layer.__dict__[name]
        return f"{name} back"
    function = getattr(type(layer), name)
    replacement = (_doubled(function) if h.choose.random() < 0.5 else lambda *a,
                   **k: _doubled(function)(*a, **k))
    # bound to the layer, so that a copy of it calls its own weights
    layer.__dict__[name] = types.MethodType(replacement, layer)
    return name


@edit(2)
def method_replaced_on_the_class(h) -> str:
    layers = _layers(h)
    if not layers:
        return "none"
    kind = type(h.choose.choice(layers))
    name = h.choose.choice(("message", "edge_update", "forward", "update"))
    if name not in vars(kind):
        return f"{name}: not there"
    before = vars(kind)[name]
    setattr(kind, name, _doubled(before))
    h.undo.append(lambda: setattr(kind, name, before))
    return f"{kind.__name__}.{name}"


@edit(2)
def function_of_a_submodule_replaced(h) -> str:
    found = [m for m in h.model.modules() if isinstance(m, (pyg.Linear, pyg.aggr.Aggregation))]
    if not found:
        return "none"
    module = h.choose.choice(found)
    if "forward" in module.__dict__:
        del module.__dict__["forward"]
        return f"{type(module).__name__} back"
    # bound to the module, so that a copy of it calls its own weights
    module.forward = types.MethodType(_doubled(type(module).forward), module)
    return type(module).__name__


@edit(3)
def hook_added(h) -> str:
    module = h.choose.choice(list(h.model.modules()))
    ways = {
        "forward": lambda: module.register_forward_hook(
            lambda m, i, out: tree_map(lambda t: t * 1.5, out)
        ),
        "forward_pre": lambda: module.register_forward_pre_hook(lambda m, i: None),
        "full_backward": lambda: module.register_full_backward_hook(lambda m, i, o: None),
    }
    if isinstance(module, pyg.MessagePassing):
        ways.update({name: functools.partial(getattr(module, f"register_{name}_forward_hook"),
                                             lambda m, i, out: out * 2)
                     for name in ("message", "propagate", "aggregate")})
        ways["message_pre"] = lambda: module.register_message_forward_pre_hook(lambda m, i: None)
    way = h.choose.choice(sorted(ways))
    h.hooks.append(ways[way]())
    return f"{way} of {type(module).__name__}"


@edit(3)
def hooks_removed(h) -> str:
    for hook in h.hooks:
        hook.remove()
    h.hooks.clear()
    return ""
