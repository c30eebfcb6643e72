"""What happens between steps of training, whatever the net: each is a function of a
`scripts.Script` and of random choices of its own; it may return words."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import swa_utils

from .scripts_ways import WAYS, checkpoints, optimizer, plainly
from .table import attempt

EVENTS: list[Callable] = []


def event(function: Callable) -> Callable:
    EVENTS.append(function)
    return function


@event
def another_way(s, r) -> str:
    s.way = r.choice(WAYS)
    return s.way.__name__


@event
def evaluated(s, r) -> str:
    """No gradients, as between epochs; afterwards training goes on."""
    mode = r.choice((torch.no_grad, torch.inference_mode))
    training, _ = s.net.training, s.net.train(r.random() < 0.2)
    with mode():
        s.say("evaluation", s.world.out(s.net))
    s.net.train(training)
    return mode.__name__


@event
def trained_or_not(s, r) -> str:
    s.net.train(r.random() < 0.6)
    return str(s.net.training)


@event
def autocast_toggled(s, r) -> str:
    s.cast = s.low and not s.cast
    return str(s.cast)


@event
def without_gnnaccel(s, r) -> str:
    if not checkpoints(s.net):
        s.native = r.choice(("all", "backward"))
    return s.native


@event
def frozen(s, r) -> None:
    for p in s.net.parameters():
        p.requires_grad_(r.random() < 0.6)
    next(s.net.parameters()).requires_grad_()


@event
def frozen_part(s, r) -> str:
    part = r.choice([m for m in s.net.modules() if next(m.parameters(), None) is not None])
    part.requires_grad_(r.random() < 0.5)
    return type(part).__name__


@event
def new_optimizer(s, r) -> None:
    """Another kind, or the same with its state loaded."""
    if r.random() < 0.5:
        s.optimizers[0] = optimizer(s.net.parameters(), r)
    else:
        s.optimizers[0].load_state_dict(copy.deepcopy(s.optimizers[0].state_dict()))


@event
def shared_optimizer_state(s, r) -> str:
    """Of the first optimizer, as a second one: its tensors are shared, as torch's own load does
    not copy what fits."""
    if len(s.optimizers) < 2 or type(s.optimizers[0]) is not type(s.optimizers[1]):
        s.optimizers.append(type(s.optimizers[0])(s.net.parameters(), lr=0.01))
    s.optimizers[-1].load_state_dict(s.optimizers[0].state_dict())
    return type(s.optimizers[0]).__name__


@event
def added_group(s, r) -> None:
    one = s.optimizers[r.randrange(len(s.optimizers))]
    new = nn.Parameter(torch.zeros(3, device=s.world.device))
    one.add_param_group({"params": [new], "lr": 0.1})
    new.grad = torch.ones_like(new)


@event
def rates_changed(s, r) -> None:
    for group in s.optimizers[0].param_groups:
        group["lr"] = 0.005 + 0.01 * r.random()
        if "amsgrad" in group and r.random() < 0.1:
            group["maximize"] = not group["maximize"]


@event
def one_optimizer_dropped(s, r) -> None:
    del s.optimizers[1:]


@event
def saved_or_loaded(s, r) -> str:
    """A checkpoint, in memory or as a file; the optimizers' states with it."""
    if not s.saved or r.random() < 0.4:
        s.saved = [copy.deepcopy(s.net.state_dict()),
                   [copy.deepcopy(o.state_dict()) for o in s.optimizers]]
        return "saved"
    s.net.load_state_dict(s.saved[0], assign=r.random() < 0.2)
    for one, state in zip(s.optimizers, s.saved[1]):
        with contextlib.suppress(ValueError, KeyError):  # of another kind by now
            one.load_state_dict(state)
    return "loaded"


@event
def pickled(s, r) -> None:
    file = io.BytesIO()
    torch.save(s.net, file)
    file.seek(0)
    s.net = torch.load(file, weights_only=False)
    s.optimizers = [optimizer(s.net.parameters(), r)]


@event
def copied(s, r) -> str:
    """Goes on with a copy of the net; the first one is dropped, or lives on."""
    old, s.net = s.net, copy.deepcopy(s.net)
    s.optimizers = [optimizer(s.net.parameters(), r)]
    if r.random() < 0.5:
        s.spare = old
        return "kept"
    del old
    gc.collect()
    return "dropped"


@event
def averaged(s, r) -> None:
    """An average of weights, evaluated."""
    average = swa_utils.AveragedModel(s.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(s.net)
    with torch.no_grad():
        for p in average.module.parameters():
            p.mul_(0.99)
        s.say("average", s.world.out(average.module))


@event
def exchanged(s, r) -> None:
    """The weights of two nets, by their memory."""
    for p, q in zip(s.net.parameters(), s.spare.parameters()):
        if p.shape == q.shape:
            p.data, q.data = q.data, p.data


@event
def collected(s, r) -> None:
    gc.collect()


@event
def failed_call(s, r) -> str:
    """An error in a layer, and on with the script."""
    s.world.failing(s.net, r)
    return "did not fail"


@event
def evaluated_in_a_thread(s, r) -> None:
    """A copy, while this thread trains."""
    if not s.world.threads:
        return plainly(s, r)
    other, found = copy.deepcopy(s.net).eval(), []

    def work() -> None:
        with s.on(), torch.no_grad():
            found.extend(attempt(lambda: s.world.out(other).clone())[0] for _ in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    plainly(s, r)
    thread.join()
    for one in found:
        s.say("thread", torch.zeros(0) if one is None else one)


@event
def hooked(s, r) -> str:
    p = r.choice([p for p in s.net.parameters() if p.requires_grad])
    p.register_hook(lambda g: g * 0.5)
    return str(tuple(p.shape))


@event
def written_in_place(s, r) -> str:
    """Weights, by a norm or noise that scripts add themselves."""
    p = r.choice(list(s.net.parameters()))
    with torch.no_grad():
        r.choice((lambda: p.mul_(0.9), lambda: p.add_(0.05), lambda: p.clamp_(-0.5, 0.5),
                  lambda: p.copy_(p.flip(0)), lambda: p.data.mul_(0.8)))()
    return str(tuple(p.shape))


@event
def looked_at_gradients(s, r) -> None:
    """Of features and weights of edges, as attributions ask for."""
    inputs = s.world.inputs()
    s.net.eval()
    for t in inputs:
        t.requires_grad_()
    try:
        for g in torch.autograd.grad(s.world.out(s.net).tanh().sum(), inputs, allow_unused=True):
            if g is not None:
                s.say("attribution", g)
    finally:
        for t in inputs:
            t.requires_grad_(False)
        s.net.train()
