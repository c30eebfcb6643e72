"""What happens to a model and its inputs between two calls: every function here is one edit of a `History`.

An edit returns a few words on what it did. Errors of the edit itself (a tensor that cannot be edited so, a module
without that option) are part of its history; calls that an edit makes may fail as the host's would.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable

import gnnaccel
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint

from .table import attempt
from .trees import named, tree_map

EDITS: list[Callable] = []


def edit(often: int):
    """Registers an edit, drawn ``often`` times as often as the rarest."""
    def register(function: Callable) -> Callable:
        EDITS.extend([function] * often)
        return function
    return register


def apply(history) -> str:
    """Make a random edit; what was done, in words."""
    function = history.choose.choice(EDITS)
    try:
        what = function(history)
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError, IndexError) as problem:
        if "device-side assert" in str(problem):
            raise
        what = f"({type(problem).__name__})"
    return f"{function.__name__} {what or ''}".strip()


def _called(h, **inputs) -> None:
    with h.backend.on(**h.options):
        attempt(lambda: h.call(h.model, **inputs))


# ---- edges ----

@edit(5)
def edges_in_place(h) -> str:
    edge_index, n, m = h.some_edges()
    size, one = edge_index.shape[1], h.choose.randrange(edge_index.shape[1])

    def drawn():
        return torch.stack([torch.randint(0, n, (size,)), torch.randint(0, m, (size,))]).to(h.device)

    ways = {
        "one edge": lambda: edge_index[:, one].copy_(drawn()[:, 0]), "sources": lambda: edge_index[0].copy_(drawn()[0]),
        "all": lambda: edge_index.copy_(drawn()), "one target": lambda: edge_index[1].fill_(h.choose.randrange(m)),
        "index_put": lambda: edge_index.index_put_((torch.tensor([1], device=h.device), torch.tensor([one], device=h.device)),
                                                   drawn()[1, :1]),
        "out=": lambda: torch.remainder(edge_index + 1, min(n, m), out=edge_index),
        "of a detached view": lambda: edge_index.detach()[0].fill_(h.choose.randrange(n)),
        "flat view": lambda: edge_index.view(-1)[:size].random_(0, n), "unbind": lambda: edge_index.unbind(0)[1].mul_(0),
        "foreach": lambda: torch._foreach_mul_([edge_index], 0), "flipped order": lambda: edge_index.copy_(edge_index.flip(1).clone()),
    }
    way = h.choose.choice(sorted(ways))
    ways[way]()
    return way


@edit(2)
def edges_of_data(h) -> str:
    """``edge_index.data`` set to another tensor: the same Python object holds other memory."""
    edge_index, n, m = h.some_edges()
    edge_index.data = torch.stack([torch.randint(0, n, (edge_index.shape[1],)), torch.randint(0, m, (edge_index.shape[1],))]).to(h.device)
    return ""


@edit(2)
def edges_in_inference_mode(h) -> str:
    with torch.inference_mode():
        edge_index, _, m = h.some_edges()
        edge_index[1].random_(0, m)
    return ""


@edit(1)
def ends_swapped(h) -> str:
    if h.edge == "types":
        return "of types: no"
    first = h.edge_index[0].clone()
    h.edge_index[0] = h.edge_index[1]
    h.edge_index[1] = first
    return ""


@edit(4)
def memory_freed_and_reused(h) -> str:
    """Other edges in new tensors, likely where the old ones were."""
    if h.edge == "types":
        key = h.choose.choice(sorted(h.edge_index))
        h.edge_index[key] = None
        h.edge_index[key] = h.random_edges(key)
        return str(key)
    h.edge_index = None
    h.edge_index = h.random_edges()
    return ""


@edit(3)
def another_graph(h) -> str:
    h.nodes, h.edges = h.choose.choice((5, 20, 31)), h.choose.choice((80, 80, 40, 200))
    h.new_graph()
    return f"{h.nodes} nodes {h.edges} edges"


@edit(1)
def fewer_edges(h) -> str:
    if h.edge == "types" or h.edges < 20:
        return "no"
    h.edges -= 10
    h.edge_index = h.edge_index[:, :h.edges]
    h.values = None if h.values is None else h.values[:h.edges].detach()
    return "a view"


# ---- weights of edges, features ----

@edit(6)
def values_in_place(h) -> str:
    if h.values is None:
        return "none"
    values = h.values = h.values.detach()
    if h.edge == "relation":
        values.add_(1).remainder_(3)
        return "other relations"
    ways = {"mul_": lambda: values.mul_(2), "one": lambda: values[0].fill_(3.), "foreach": lambda: torch._foreach_add_([values], .5),
            "out=": lambda: torch.mul(values, .5, out=values), "flat view": lambda: values.view(-1)[1:3].fill_(.7),
            "data": lambda: values.data.mul_(1.7), "data set": lambda: setattr(values, "data", values * 1.3 + .1)}
    if h.device.type == "cpu":
        ways["numpy"] = lambda: values.numpy().__imul__(1.5)
    way = h.choose.choice(sorted(ways))
    ways[way]()
    return way


@edit(2)
def values_reallocated(h) -> str:
    h.values = None
    if h.edge != "types":
        h.new_values()
    return ""


@edit(2)
def values_with_gradient(h) -> str:
    if h.values is None or not h.values.is_floating_point():
        return "none"
    h.values = h.values.detach().clone().requires_grad_(h.choose.random() < .6)
    return str(h.values.requires_grad)


@edit(1)
def values_in_inference_mode(h) -> str:
    if h.values is None or not h.values.is_floating_point():
        return "none"
    with torch.inference_mode():
        h.values.add_(.3)
    return ""


@edit(2)
def features_edited(h) -> str:
    if h.choose.random() < .4:
        h.x = tree_map(lambda t: h.normal(*t.shape), h.x)
        return "new"
    h.x = tree_map(lambda t: t.detach(), h.x)
    tree_map(lambda t: t.add_(1), h.x)
    return "in place"


# ---- the model's own weights, options, submodules ----

@edit(5)
def weights_changed(h) -> str:
    found = list(h.model.named_parameters())
    if not found:
        return "none"
    name, p = h.choose.choice(found)
    path, _, last = name.rpartition(".")
    owner = h.model.get_submodule(path)

    def state() -> dict:
        return {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in h.model.state_dict().items()}

    ways = {
        "replaced": lambda: setattr(owner, last, nn.Parameter(torch.randn_like(p))), "copy_": lambda: p.copy_(torch.randn_like(p)),
        "data set": lambda: setattr(p, "data", torch.randn_like(p)), "data": lambda: p.data.mul_(-1.5),
        "state": lambda: h.model.load_state_dict(state()), "state assigned": lambda: h.model.load_state_dict(state(), assign=True),
        "half and back": lambda: h.model.half().float(), "double and back": lambda: h.model.double().float(),
        "reset": lambda: h.model.reset_parameters(), "other strides": lambda: setattr(p, "data", p.data.t().contiguous().t()),
    }
    if h.device.type == "cpu":
        ways["numpy"] = lambda: p.detach().numpy().__imul__(.5)
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
    optimizer = kind(parameters, lr=.05, foreach=h.choose.random() < .5)
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
        self.down = nn.Parameter(torch.randn(2, base.in_channels, device=device) * .1)
        self.up = nn.Parameter(torch.randn(base.out_channels, 2, device=device) * .1)

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@edit(2)
def linear_map_replaced(h) -> str:
    slots = [(m, k, v) for m in h.model.modules() for k, v in m._modules.items() if type(v) is pyg.Linear]
    if not slots:
        return "none"
    owner, key, old = h.choose.choice(slots)
    plain = nn.Linear(old.in_channels, old.out_channels, bias=old.bias is not None).to(h.device)
    setattr(owner, key, LowRank(old) if h.choose.random() < .5 else plain)
    return f"{key} by {type(getattr(owner, key)).__name__}"


_OPTIONS = {"negative_slope": (.1, .2, .7), "add_self_loops": (True, False), "dropout": (0., 0., .3), "improved": (True, False),
            "flow": ("source_to_target", "target_to_source"), "normalize": (True, False), "eps": (0., .5), "K": (1, 2, 3),
            "attention_type": ("MX", "SD"), "concat": (True, False)}


def _layers(h) -> list:
    return [m for m in h.model.modules() if isinstance(m, pyg.MessagePassing)]


@edit(4)
def option_changed(h) -> str:
    layer = h.choose.choice(_layers(h) or [h.model])
    choices = [(k, v) for k, values in _OPTIONS.items() if isinstance(layer.__dict__.get(k), (bool, int, float, str)) for v in values]
    if not choices:
        return "none"
    name, value = h.choose.choice(choices)
    setattr(layer, name, value)
    return f"{type(layer).__name__}.{name} = {value}"


@edit(2)
def aggregation_changed(h) -> str:
    layers = [m for m in _layers(h) if hasattr(m, "aggr_module") and not isinstance(m.aggr_module, pyg.MultiAggregation)]
    if not layers:
        return "none"
    layer = h.choose.choice(layers)
    for name in ("t", "p"):
        if isinstance(getattr(layer.aggr_module, name, None), float) and h.choose.random() < .5:
            setattr(layer.aggr_module, name, h.choose.choice((.5, 2., 3.)))
            return name
    layer.aggr_module = h.choose.choice((pyg.SumAggregation, pyg.MeanAggregation, pyg.MaxAggregation))().to(h.device)
    return type(layer.aggr_module).__name__


# ---- methods and hooks ----

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
    layer, name = h.choose.choice(layers), h.choose.choice(("message", "aggregate", "update", "forward", "propagate"))
    if name in layer.__dict__:
        del layer.__dict__[name]
        return f"{name} back"
    function = getattr(layer, name)
    layer.__dict__[name] = _doubled(function) if h.choose.random() < .5 else lambda *a, **k: _doubled(function)(*a, **k)
    return name


@edit(2)
def method_replaced_on_the_class(h) -> str:
    layers = _layers(h)
    if not layers:
        return "none"
    kind, name = type(h.choose.choice(layers)), h.choose.choice(("message", "edge_update", "forward", "update"))
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
    module.forward = _doubled(module.forward)
    return type(module).__name__


@edit(3)
def hook_added(h) -> str:
    module = h.choose.choice(list(h.model.modules()))
    ways = {"forward": lambda: module.register_forward_hook(lambda m, i, out: tree_map(lambda t: t * 1.5, out)),
            "forward_pre": lambda: module.register_forward_pre_hook(lambda m, i: None),
            "full_backward": lambda: module.register_full_backward_hook(lambda m, i, o: None)}
    if isinstance(module, pyg.MessagePassing):
        ways.update({name: functools.partial(getattr(module, f"register_{name}_forward_hook"), lambda m, i, out: out * 2)
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


# ---- ways of calling ----

@edit(2)
def mode_changed(h) -> str:
    h.model.train(h.choose.random() < .5)
    return "train" if h.model.training else "eval"


@edit(2)
def gradients_wanted(h) -> str:
    what = h.choose.choice(("parameters", "x", "at all"))
    if what == "parameters":
        for p in h.model.parameters():
            p.requires_grad_(h.choose.random() < .6)
    elif what == "x":
        h.grad_x, h.x = not h.grad_x, tree_map(lambda t: t.detach(), h.x)
    else:
        h.grad = h.choose.random() < .6
    return what


@edit(1)
def autocast_changed(h) -> str:
    h.autocast = not h.autocast
    return str(h.autocast)


@edit(1)
def determinism_changed(h) -> str:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)
    return str(torch.are_deterministic_algorithms_enabled())


@edit(2)
def called_otherwise(h) -> str:
    way = h.choose.choice(("inference", "other edges", "checkpoint", "functional", "raising hook", "other thread of options"))
    if way == "inference":
        with torch.inference_mode():
            _called(h)
    elif way == "other edges":
        _called(h, edge_index=tree_map(lambda t: t.flip(1).contiguous(), h.edge_index))
    elif way == "checkpoint" and h.grad and not h.autocast:
        with h.backend.on(**h.options):
            x = tree_map(lambda t: t.detach().requires_grad_(), h.x)
            outs = named(checkpoint(lambda: h.call(h.model, x), use_reentrant=False))
            sum(t.sum() for t in outs.values()).backward()
        h.model.zero_grad()
    elif way == "functional":
        weights = {k: v.detach() * 2 for k, v in h.model.named_parameters()}
        with h.backend.on(**h.options):
            torch.func.functional_call(h.model, weights, (h.x, h.edge_index) + (() if h.values is None else (h.values,)))
    elif way == "raising hook":
        hook = h.model.register_forward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            _called(h)
        hook.remove()
    else:
        with h.backend.on(when="profitable"):
            attempt(lambda: h.call(h.model))
    return way


@edit(2)
def options_changed(h) -> str:
    h.options = h.choose.choice(({}, {"passes": ()}, {"records": 5}, {"when": "profitable"}, {"passes": ("compaction",)},
                                 {"backward": "workers"}))
    return str(h.options)


@edit(2)
def another_model(h) -> str:
    way = h.choose.choice(("copy", "new", "other"))
    if way == "copy":
        hooks_removed(h)
        for module in h.model.modules():
            for name in ("message", "aggregate", "update", "forward", "propagate"):
                module.__dict__.pop(name, None)
        h.model = copy.deepcopy(h.model)
    elif way == "new":
        h.model = h.new_model()
    else:
        h.spare, h.model = h.model, h.spare
    return way


@edit(1)
def rules_changed(h) -> str:
    way = h.choose.choice(("exclude", "include", "reset", "clear"))
    if way == "reset":
        gnnaccel.reset_rules()
    elif way == "clear":
        gnnaccel.cache.clear()
        gc.collect()
    else:
        getattr(gnnaccel, way)(h.choose.choice(list(h.model.modules())))
    return way
