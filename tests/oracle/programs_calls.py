"""What happens between two calls of a user's net."""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .graphs import IN
from .judge import nudged

_LAYERS = ("conv", "seco")
#: the attributes that some changes are of
_ATTRIBUTES = {"slope": "opts", "power": "opts", "no power": "opts", "rate": "rates",
               "other rates": "rates", "buffer": "scale", "global": "scale", "no eps": "eps",
               "hook": "shared", "norm of weight": "shared"}
EVENTS: list[Callable[[World, random.Random], Any]] = []


class World:
    """A net, its graph and features, and how it is called next.

    ``exact``: all is in fp64; ``nudge``: weights and features are one rounding away.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        program,
        seed: int,
        device: torch.device,
        exact: bool = False,
        nudge: int | None = None,
    ):
        self.program, self.exact, self.nudge = program, exact, nudge
        torch.manual_seed(seed)
        self.net = make()
        module = sys.modules[type(self.net).__module__]
        module.scale, module.helper = 0.5, module.helped
        self.spare = {
            k: torch.randn_like(v) if v.is_floating_point() else v
            for k, v in self.net.state_dict().items()
        }
        self.dtype = torch.float64 if exact else torch.float32
        self.device = device
        self.net.to(device, self.dtype)
        self.nodes, self.edges = 13, 57
        self.form, self.grad, self.cast, self.loss = "leaf", "grad", False, "squares"
        self.written = False  # features, between forward and backward
        self.touched = False  # what was kept, at the end of a call
        self.late = ""  # what else changes there, after the next forward
        self.given = {"edge_attr": True, "edge_weight": True}
        self.learned = ()  # features of edges that want gradients
        self.new_graph()
        self.moved()

    def new_graph(self) -> None:
        n, e = self.nodes, self.edges
        high = torch.tensor([n, n // 2 + 1 if self.program.bipartite else n])
        if "target_to_source" in self.program.text:
            high = high.flip(0)
        self.edge_index = (
            (torch.rand(2, e, dtype=torch.float64) * high.view(2, 1)).long().to(self.device)
        )
        self.rows = self.placed(torch.randn(n, IN))
        self.features = {
            "edge_attr": self.placed(torch.randn(e, 3)),
            "edge_weight": self.placed(torch.rand(e) + 0.1),
        }
        self.whole = {"kind": torch.randint(0, 3, (e,)).to(self.device)}
        self.pos = self.placed(torch.randn(n, 3))

    def reads(self, name: str) -> bool:
        """Whether the program reads an attribute of this name."""
        body = self.program.text.partition("self.kept_too = None")[2]
        return re.search(rf"self\.{name}\b|\b{name}\(|\* {name}\b", body) is not None

    def placed(self, value: Tensor) -> Tensor:
        return value.to(self.device, self.dtype)

    def moved(self) -> None:
        """Weights, one rounding away where that is asked."""
        if self.nudge is not None:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.copy_(nudged(p, self.nudge, 2.0**-9 if self.cast else None))

    def inputs(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Features of nodes, the other arguments, and all that gradients are asked of."""
        rows = self.rows if self.nudge is None else nudged(self.rows, self.nudge)
        rows, wants = rows.detach(), self.grad == "grad"
        asked: dict[str, Tensor] = {}
        if self.form == "expanded":
            asked["x"] = one = rows[:1].clone().requires_grad_(wants)
            x = one.expand(self.nodes, IN)
        elif self.form == "strided":
            asked["x"] = wide = rows.repeat(1, 2).requires_grad_(wants)
            x = wide[:, ::2]
        elif self.form == "made":
            asked["x"] = leaf = rows.clone().requires_grad_(wants)
            x = leaf * 1.5
        elif self.form == "constant":
            x = rows.clone()
        elif self.form == "same":
            x = self.rows
        elif self.form == "transposed":
            asked["x"] = x = rows.t().contiguous().t().requires_grad_(wants)
        else:
            asked["x"] = x = (
                nn.Parameter(rows.clone())
                if self.form == "parameter"
                else rows.clone().requires_grad_(wants)
            )
        given = {
            k: _same(v).requires_grad_(k in self.learned and wants and v.is_floating_point())
            for k, v in self.features.items()
            if self.given[k] or not self.program.optional
        }
        asked |= {k: v for k, v in given.items() if v.requires_grad}
        return x, {**given, **self.whole, "pos": self.pos}, asked


def _same(value: Tensor) -> Tensor:
    """A copy that lies in memory as ``value`` does."""
    if 0 in value.stride():
        return value[:1].clone().expand(value.shape)
    return value.detach().clone()


def event(often: int):
    def register(function):
        EVENTS.extend([function] * often)
        return function

    return register


@event(3)
def another_graph(w: World, r: random.Random) -> None:
    w.nodes, w.edges = r.choice(
        (
            (13, 57),
            (13, 57),
            (9, 57),
            (31, 57),
            (13, 80),
            (20, 300),
            (5, 5),
            (13, 8),
            (8, 13),
            (13, 1),
            (13, 0),
            (4, 4),
        )
    )
    w.new_graph()


@event(2)
def edges_in_place(w: World, r: random.Random) -> str:
    way = r.choice(("flip", "one", "copy"))
    if way == "flip":
        w.edge_index.copy_(w.edge_index.flip(1).clone())
    elif way == "one":
        w.edge_index[:, 0] = 0
    else:
        w.edge_index.copy_(w.edge_index[:, torch.randperm(w.edges)])
    return way


@event(4)
def weights(w: World, r: random.Random) -> str:
    found = [(k, p) for k, p in w.net.named_parameters() if w.reads(k.split(".")[k[:4] in _LAYERS])]
    name, p = r.choice(found)
    owner, last = w.net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    new = torch.randn(p.shape).to(p)
    ways = {
        "data": lambda: setattr(p, "data", new),
        "copy": lambda: p.copy_(new),
        "state": lambda: w.net.load_state_dict(w.spare),
        "replaced": lambda: setattr(owner, last, nn.Parameter(new)),
        "in data": lambda: p.data.mul_(0.5),
        "step": lambda: torch.optim.SGD(w.net.parameters(), 0.01).step(),
    }
    way = r.choice(sorted(ways))
    if way == "step" and w.cast:
        return "none after autocast"
    with torch.no_grad():
        ways[way]()
    return f"{way} {name}"


@event(3)
def frozen(w: World, r: random.Random) -> None:
    for p in w.net.parameters():
        p.requires_grad_(r.random() < 0.7)


@event(2)
def module_replaced(w: World, r: random.Random) -> str:
    name = r.choice(
        ("lin", "lin2", "shared", "frozen", "last", "pair", "edge_lin", "mlp", "act", "norm")
    )
    layer, old = w.net.conv, getattr(w.net.conv, name)
    if isinstance(old, nn.Linear):
        new: nn.Module = nn.Linear(old.in_features, old.out_features, bias=r.random() < 0.5)
    elif isinstance(old, nn.Sequential):
        new = nn.Sequential(old[0], nn.Tanh(), old[2])
    else:
        new = r.choice((nn.Identity(), nn.Tanh(), nn.ELU()))
    setattr(layer, name, new.to(w.device, w.dtype))
    return name


@event(8)
def attribute(w: World, r: random.Random) -> str:
    layer = r.choice((w.net.conv, w.net.conv, w.net.second))
    module = sys.modules[type(layer).__module__]
    ways = {
        "eps": lambda: setattr(layer, "eps", r.choice((0.3, 0.5, 2))),
        "limit": lambda: setattr(layer, "limit", 0.2),
        "on": lambda: setattr(layer, "on", not layer.on),
        "slope": lambda: layer.opts.__setitem__("slope", r.choice((0.0, 0.5))),
        "power": lambda: layer.opts.__setitem__("power", r.choice((1.0, 2.0))),
        "no power": lambda: layer.opts.pop("power", None),
        "rates": lambda: layer.rates.append(0.25),
        "rate": lambda: layer.rates.__setitem__(0, 1.5),
        "other rates": lambda: setattr(layer, "rates", (1, 0.5)),
        "scale": lambda: layer.scale.mul_(-1),
        "buffer": lambda: setattr(layer, "scale", layer.scale + 1),
        "kept": lambda: setattr(layer, "kept", None),
        "act": lambda: setattr(layer.act, "negative_slope", 0.4),
        "fn": lambda: setattr(
            layer, "fn", r.choice((torch.sigmoid, F.elu, nn.Softplus(), layer.lin2))
        ),
        "pick": lambda: setattr(layer, "pick", r.choice(("lin2", "shared"))),
        "global": lambda: setattr(module, "scale", r.choice((0.5, 0.7))),
        "helper": lambda: setattr(module, "helper", lambda a, b=1.0: a.sin() * b),
        "no eps": lambda: delattr(layer, "eps"),
        "hook": lambda: layer.shared.register_forward_hook(lambda module, given, out: out * 2),
        "norm of weight": lambda: nn.utils.parametrizations.weight_norm(layer.shared),
    }
    way = r.choice([k for k in sorted(ways) if w.reads(_ATTRIBUTES.get(k, k))] or ["kept"])
    ways[way]()
    return way


@event(4)
def features_of_nodes(w: World, r: random.Random) -> str:
    w.form = r.choice(
        ("leaf", "expanded", "strided", "made", "constant", "same", "transposed", "parameter")
    )
    return w.form


@event(3)
def features_of_edges(w: World, r: random.Random) -> str:
    w.given = {k: r.random() < 0.6 for k in w.given}
    w.learned = tuple(k for k in w.given if r.random() < 0.5)
    if r.random() < 0.3:
        for value in w.features.values():
            value.mul_(2)
    return f"{w.given} {w.learned}"


@event(3)
def gradients(w: World, r: random.Random) -> str:
    w.grad = r.choice(("grad", "no_grad", "inference")) if w.grad == "grad" else "grad"
    return w.grad


@event(5)
def losses(w: World, r: random.Random) -> str:
    w.loss, w.written = (
        r.choice(("squares", "cos", "twice", "second", "hooks", "asked", "checkpoint")),
        False,
    )
    w.written, w.touched = w.form == "made" and r.random() < 0.5, r.random() < 0.3
    return w.loss + " written" * w.written


@event(2)
def layouts(w: World, r: random.Random) -> str:
    """Other strides or types of what edges have."""
    way = r.choice(("strided", "expanded", "edges strided", "edges of view", "whole", "wide"))
    if way == "strided":
        w.features["edge_attr"] = w.features["edge_attr"].t().contiguous().t()
    elif way == "expanded":
        w.features = {k: v[:1].expand(v.shape) for k, v in w.features.items()}
    elif way == "whole":
        w.features["edge_weight"] = torch.randint(1, 4, (w.edges,)).to(w.device)
    elif way == "wide":
        w.features["edge_weight"] = w.features["edge_weight"].double()
    elif way == "edges strided":
        w.edge_index = w.edge_index.t().contiguous().t()
    else:
        w.edge_index = torch.cat([w.edge_index, w.edge_index])[1:3].flip(0)
    return way


@event(2)
def tied(w: World, r: random.Random) -> str:
    """A weight or module that stands in two places."""
    layer = w.net.conv
    ways = {
        "weight": lambda: setattr(layer.frozen, "weight", layer.shared.weight),
        "module": lambda: setattr(layer, "shared", layer.lin2),
        "layers": lambda: setattr(w.net.second, "shared", layer.shared),
        "head": lambda: layer.heads.__setitem__(0, layer.heads[1]),
        "W": lambda: setattr(layer, "W", layer.shared.weight),
        "apart": lambda: setattr(layer.shared, "weight", nn.Parameter(layer.W.detach().clone())),
        "buffer": lambda: layer.scale.requires_grad_(),
    }
    way = r.choice(sorted(ways))
    ways[way]()
    return way


@event(2)
def between(w: World, r: random.Random) -> str:
    """What is changed after the next forward and before its backward."""
    w.late = r.choice(
        (
            "eps",
            "slope",
            "rates",
            "scale",
            "edge_attr",
            "edge_weight",
            "pos",
            "eval",
            "again",
            "frozen",
            "act",
            "edges",
        )
    )
    return w.late


@event(1)
def autocast(w: World, r: random.Random) -> str:
    """For the next call."""
    w.cast = True
    return str(w.cast)


@event(2)
def mode(w: World, r: random.Random) -> None:
    w.net.train(r.random() < 0.5)


@event(1)
def copied(w: World, r: random.Random) -> None:
    w.net = copy.deepcopy(w.net)


@event(1)
def dtypes(w: World, r: random.Random) -> str:
    """Other numbers for one call or more; in fp64 from the start for the truth."""
    if not w.exact:
        w.dtype = torch.float64 if w.dtype == torch.float32 else torch.float32
        w.net.to(w.dtype)
        w.rows, w.pos = w.rows.to(w.dtype), w.pos.to(w.dtype)
        w.features = {
            k: v.to(w.dtype) if v.is_floating_point() else v for k, v in w.features.items()
        }
    return str(w.dtype)
