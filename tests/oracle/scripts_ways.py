"""Ways of a step of training, whatever the net: each is a function of a `scripts.Script` and of
random choices."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .backends import off

WAYS: list[Callable] = []


def way(function: Callable) -> Callable:
    WAYS.append(function)
    return function


def optimizer(parameters, r: random.Random) -> torch.optim.Optimizer:
    """Any of torch's; epsilons are large, so that rounding does not become a step."""
    parameters = list(parameters)
    half = len(parameters) // 2
    if r.random() < 0.3 and half:
        parameters = [{"params": parameters[:half], "weight_decay": 0.1, "eps": 0.1},
                      {"params": parameters[half:], "lr": 0.003}]
    eps = {"lr": 0.01, "eps": 1e-2}
    o = torch.optim
    return r.choice((
        lambda: o.SGD(parameters, 0.02, momentum=r.choice((0, 0.9)), foreach=r.random() < 0.5),
        lambda: o.Adam(parameters, **eps),
        lambda: o.Adam(parameters, **eps, amsgrad=True, weight_decay=r.choice((0, 0.01))),
        lambda: o.Adam(parameters, **eps, maximize=True, betas=(0.5, 0.9)),
        lambda: o.Adam(parameters, **eps, **r.choice(({"foreach": True}, {"foreach": False},
                                                      {"fused": True}))),
        lambda: o.Adam(parameters, lr=torch.tensor(0.01), eps=1e-2, foreach=False),
        lambda: o.AdamW(parameters, **eps, amsgrad=r.random() < 0.5),
        lambda: o.NAdam(parameters, **eps),
        lambda: o.RMSprop(parameters, **eps, centered=r.random() < 0.5),
        lambda: o.Adagrad(parameters, **eps),
    ))()


def initialised(*nets: nn.Module) -> None:
    """PyG leaves `l2` of `RGATConv` as the memory was. On a GPU nothing is cached: a list of edges
    that is kept for fewer nodes would end the process, natively too."""
    for m in (m for net in nets for m in net.modules() if getattr(m, "cached", False)):
        m.cached = not next(m.parameters()).is_cuda
    with torch.no_grad():
        for name, p in (pair for net in nets for pair in net.named_parameters()):
            if name.endswith("l2"):
                p.fill_(0.1)


def moves(net: nn.Module) -> bool:
    """Whether a call leaves something behind that the next one reads, but statistics of norms."""
    return any(getattr(m, "moves", False) for m in net.modules())


def checkpoints(net: nn.Module) -> bool:
    """Whether backward repeats calls of the net, in whatever block and with whatever weights hold
    then."""
    return (getattr(net, "form", "") == "checkpointed"
            or any(hasattr(m, "ckpt_grad") for m in net.modules()))


def loss(s, net: nn.Module | None = None) -> Tensor:
    """The loss of a net, with autocast where the script has turned it on."""
    with torch.autocast(s.world.device.type, torch.bfloat16) if s.cast else \
            contextlib.nullcontext(), off() if s.native == "all" else contextlib.nullcontext():
        found = s.world.loss(s.net if net is None else net)
    s.say("loss", found)
    return found


def backward(s, value: Tensor, **options) -> None:
    with off() if s.native else contextlib.nullcontext():
        value.backward(**options)


def step(s) -> None:
    if s.clip:
        s.say("norm", nn.utils.clip_grad_norm_(s.net.parameters(), s.clip))
    for one in s.optimizers:
        one.step()
    s.native = ""


@way
def plainly(s, r) -> None:
    for one in s.optimizers:
        one.zero_grad(set_to_none=r.random() < 0.8)
    backward(s, loss(s))
    step(s)


@way
def accumulated(s, r) -> None:
    s.net.zero_grad()
    for _ in range(3):
        backward(s, loss(s) / 3)
        if r.random() < 0.5:
            r.choice(s.world.edits)(s, r)
    step(s)


@way
def with_one_backward(s, r) -> None:
    """Several calls, over edges that change in between, before backward."""
    s.net.zero_grad()
    total = loss(s)
    for _ in range(2):
        s.world.again(r)
        total = total + loss(s)
    backward(s, total)
    step(s)


@way
def by_closure(s, r) -> None:
    def closure() -> Tensor:
        s.net.zero_grad()
        found = loss(s)
        found.backward()
        return found

    kind = r.choice(("LBFGS", "own"))
    one = (torch.optim.LBFGS([p for p in s.net.parameters() if p.requires_grad], 0.05, max_iter=3)
           if kind == "LBFGS" else s.optimizers[0])
    one.step(closure)
    s.native = ""


@way
def checkpointed(s, r) -> None:
    if moves(s.net):
        return plainly(s, r)
    s.net.zero_grad()
    s.native = ""
    found = checkpoint(lambda: loss(s), use_reentrant=False)
    backward(s, found)
    step(s)


@way
def adversarial(s, r) -> None:
    """A step against features and weights of edges, then one of the net."""
    inputs = s.world.inputs()
    for t in inputs:
        t.requires_grad_()
    try:
        found = torch.autograd.grad(loss(s), inputs, allow_unused=True,
                                    retain_graph=r.random() < 0.3)
    finally:
        for t in inputs:
            t.requires_grad_(False)
    for t, g in zip(inputs, found):
        if g is not None:
            t.add_(0.1 * g / (g.norm() + 1e-2))
            s.say("gradient", g)
    plainly(s, r)


@way
def penalised(s, r) -> None:
    """Gradients of gradients: a penalty on what the features' are."""
    if not s.world.second:
        return plainly(s, r)
    s.net.zero_grad()
    x = s.world.inputs()[0].requires_grad_()
    try:
        found = loss(s)
        (g,) = torch.autograd.grad(found, x, create_graph=True, allow_unused=True)
        backward(s, found if g is None else found + g.pow(2).sum())
    finally:
        x.requires_grad_(False)
    step(s)


@way
def meta_learned(s, r) -> None:
    """An inner step whose graph is kept, and the outer loss over weights after it."""
    if checkpoints(s.net):
        return plainly(s, r)
    s.net.zero_grad()
    names = [k for k, p in s.net.named_parameters() if p.requires_grad]
    weights = [p for p in s.net.parameters() if p.requires_grad]
    first = r.random() < 0.4 or not s.world.second
    grads = torch.autograd.grad(loss(s), weights, create_graph=not first, allow_unused=True)
    fast = {k: p if g is None else p - 0.02 * g for k, p, g in zip(names, weights, grads)}
    found = loss(s, lambda *a, **k: torch.func.functional_call(s.net, fast, a, k))
    backward(s, found)
    step(s)


@way
def against_each_other(s, r) -> None:
    """Two nets with an optimizer each, as of a GAN: each sees what the other computes."""
    s.net.zero_grad()
    other = torch.optim.SGD(s.spare.parameters(), 0.02)
    with torch.no_grad():
        fake = s.world.out(s.net)
    (s.world.out(s.spare) - fake).pow(2).mean().backward()
    other.step()
    other.zero_grad()
    found = loss(s) - 0.1 * (s.world.out(s.spare).detach() - s.world.out(s.net)).tanh().mean()
    backward(s, found)
    step(s)


@way
def twice_backward(s, r) -> None:
    s.net.zero_grad()
    found = loss(s)
    backward(s, found, retain_graph=True)
    backward(s, found)
    step(s)


