"""Random training scripts: after each step they hold what they hold without gnnaccel.

    python -m tests.oracle.scripts 13 emulated      a case, without what its alarm does not take

A script has a world (`scripts_pyg`, `scripts_dgl`: a net and its data), optimizers, and some steps.
Before a step a few things happen (`scripts_events` and the world's own ``edits``), each with random
choices of its own, so that any of them can be left out and all others stay.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor, nn

from . import scripts_events as events
from . import scripts_ways as ways
from .backends import Backend, off
from .judge import CONDITIONED, Results, differing, distances, nudged
from .table import attempt

FLOOR = 1e-4  # an old answer is further off
LOW_FLOOR = 5e-2  # in scripts that turn autocast on
NUDGES = 4  # runs of the host over weights that are one rounding away, before each step
FACTOR = 6  # times what these differ by
LOST = 1e-2  # from here on a script goes on from other numbers: it ends
OPTIONS = {
    "cpu": ({}, {"when": "profitable"}, {"capture": True}, {"backward": "workers"}),
    "emulated": ({}, {}, {}, {"when": "profitable"}, {"backward": "workers"}),
    "gpu": ({}, {}, {"when": "profitable"}, {"capture": True}),
}


def worlds() -> dict[str, Callable]:
    from . import scripts_dgl, scripts_pyg

    return {**scripts_pyg.WORLDS, **scripts_dgl.WORLDS}


class Script:
    """One run of a script. ``without``: what is left out, as (step, place)."""

    def __init__(self, seed: int, world: Callable, on: Callable, device: torch.device,
                 nudge: int | None = None, without: frozenset = frozenset()):
        self.seed, self.on, self.nudge, self.without = seed, on, nudge, without
        self.log: list[tuple[tuple[int, int], str]] = []
        self.said: Results = {}
        r = random.Random(f"script {seed}")
        seeded(seed)
        with off():
            self.world = world(r, device)
            self.net: nn.Module = self.world.net(r).to(device)
            self.spare: nn.Module = self.world.net(r).to(device)
        ways.initialised(self.net, self.spare)
        self.steps = r.randint(5, 10)
        self.clip, self.way = r.choice((None, None, 1.0)), r.choice(ways.WAYS)
        self.cast = False
        self.low = r.random() < 0.2  # whether autocast may be turned on
        self.native = ""  # "all" or "backward": what of the next step runs without gnnaccel
        self.saved: list = []
        self.optimizers = [ways.optimizer(self.net.parameters(), r)]
        if r.random() < 0.2:
            self.optimizers.append(ways.optimizer(self.net.parameters(), r))

    def say(self, name: str, value: Tensor) -> None:
        """A result besides the losses, to be compared."""
        self.said[f"{name} {len(self.said)}"] = value.detach().clone()

    def run(self) -> Iterator[Results]:
        """What the script holds after each step."""
        for step in range(self.steps):
            self._round()
            seeded(self.seed * 1000 + step)
            self.said, r = {}, random.Random(f"{self.seed} {step}")
            found = [(r.choice(events.EVENTS + self.world.edits * 2), r.random())
                     for _ in range(r.choice((0, 1, 1, 2, 3)))]
            with self.on():
                for place, (event, number) in enumerate(found):
                    self._attempt((step, place), event, number)
                self._attempt((step, -1), self.way, r.random())
            yield self._held()

    def _attempt(self, at: tuple[int, int], event: Callable, number: float) -> None:
        """What is refused goes on with the next: which error it is, is a result, too."""
        if at in self.without:
            return
        own = random.Random(f"{self.seed} {at} {number}")
        words, problem = attempt(lambda: event(self, own))
        if problem:
            self.said[f"raised by {event.__name__}"] = torch.tensor(1)
            words = problem
        self.log.append((at, f"{event.__name__} {words or ''}".strip()))

    def _round(self) -> None:
        if self.nudge is not None:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.copy_(nudged(p, self.nudge, 2.0**-9 if self.low else None))

    def _held(self) -> Results:
        found = {f"out {k}": v for k, v in self.said.items()}
        found |= {f"net {k}": v for k, v in self.net.state_dict().items()}
        found |= {f"gradient of {k}": p.grad for k, p in self.net.named_parameters()}
        for k, optimizer in enumerate(self.optimizers):
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for name, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        head = "out " if name == "step" else ""
                        found[f"{head}optimizer {k} {name} of {i}"] = value
        found |= {f"out {k}": v for k, v in self.world.tensors().items()}
        found = {k: v if v is None else v.detach().coalesce().to_dense().clone() if v.is_sparse
                 else v.detach().clone() for k, v in found.items()}
        if not self.world.draws(self.net):
            found["out random numbers"] = torch.get_rng_state()
        return found


def seeded(seed: int) -> None:
    """All of the generators that PyG and DGL draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))


def check(seed: int, backend: Backend, name: str = "",
          without: frozenset = frozenset()) -> tuple[str, str | None, int]:
    """What was run, what is wrong with it, and how many steps were compared."""
    r, known = random.Random(f"world {seed}"), worlds()
    name = name if name in known else r.choice([w for w in known if name in w])
    options = r.choice(OPTIONS[backend.name])
    runs = {
        "host": Script(seed, known[name], off, backend.device, without=without),
        "ours": Script(seed, known[name], lambda: backend.on(**options), backend.device,
                       without=without),
    }
    made = {key: script.run() for key, script in runs.items()}
    for step in range(runs["host"].steps):
        host, got = next(made["host"]), next(made["ours"])
        backend.finish()
        wrong = _wrong(runs, host, got, step, known[name], without)
        if wrong is not None:
            said = "; ".join(f"{at} {words}" for at, words in runs["ours"].log)
            head = CONDITIONED if wrong.startswith(CONDITIONED) else ""
            return (f"{name} {options}", f"{head}step {step}: {wrong[len(head):]} | {said}",
                    step + 1)
    return f"{name} {options}", None, runs["host"].steps


def _wrong(runs: dict[str, Script], host: Results, got: Results, step: int, world: Callable,
           without: frozenset) -> str | None:
    """What is wrong with what the scripts hold after a step."""
    raised = {key: [words for _, words in script.log] for key, script in runs.items()}
    if runs["host"].world.draws(runs["host"].net):  # other numbers; see docs/limits.md
        kept = {k for k in host if "raised" in k}
        host, got = ({k: v for k, v in part.items() if k in kept or "raised" in k}
                     for part in (host, got))
    if got.keys() != host.keys():
        ours = [k for k in got.keys() - host.keys() if "raised" in k]
        names = sorted(got.keys() ^ host.keys())
        # what the host refuses alone is no error of ours
        head = "" if ours or not any("raised" in k for k in names) else CONDITIONED
        return (f"{head}results {names[:3]} in one only: {raised['ours'][-3:]}, "
                f"not {raised['host'][-3:]}")
    if any(t is not None and not t.isfinite().all() for t in host.values()):
        return CONDITIONED + "the host's own numbers are not finite"
    found = differing(got, host)
    limit = LOW_FLOOR if runs["host"].low else FLOOR
    large = {} if found else {k: v for k, v in distances(got, host).items() if not v <= limit}
    if found is None and not large:
        return None
    beside = [one[step] for one in _nudged(runs["host"], world, without)]
    if found is not None:
        return (CONDITIONED if any(differing(n, host) for n in beside) else "") + found.text
    apart = [distances(n, host) for n in beside if n.keys() == host.keys()]
    spread = {k: max((one.get(k, 0.0) for one in apart), default=0.0) for k in large}
    name = max(large, key=lambda k: large[k] / (FACTOR * spread[k] + FLOOR))
    text = f"{name}: {large[name]:.2e} off, the host over numbers nearby {spread[name]:.2e}"
    if large[name] > FACTOR * spread[name] + FLOOR:
        return text
    return CONDITIONED + text if large[name] > LOST else None


def _nudged(host: Script, world: Callable, without: frozenset) -> list[list[Results]]:
    """The host's script with its weights moved by one rounding before each step, and the scores of
    nodes by which pooling keeps some, each for itself: of nodes that tie any may be kept."""
    device, found = next(host.net.parameters()).device, []
    state = torch.get_rng_state()
    for n in range(NUDGES):
        with _scores_moved(n):
            found.append(list(Script(host.seed, world, off, device, n, without).run()))
    torch.set_rng_state(state)
    return found


@contextlib.contextmanager
def _scores_moved(seed: int) -> Iterator[None]:
    from torch_geometric.nn.pool.select import topk as module

    def moved(x: Tensor, *args, **kwargs) -> Tensor:
        up = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device) < 0.5
        step = torch.finfo(x.dtype).eps
        return original(x * torch.where(up, 1 + step, 1 - step).to(x.dtype), *args, **kwargs)

    original, module.topk = module.topk, moved
    try:
        yield
    finally:
        module.topk = original


def shrunk(seed: int, backend: Backend, name: str = "") -> str | None:
    """The same finding of a script from which all is left out that it does not take."""
    what, wrong, _ = check(seed, backend, name)
    if wrong is None:
        return None
    without: frozenset = frozenset()
    world = what.split(" ")[0]
    for at in [(s, p) for s in range(12) for p in (0, 1, 2, -1)]:
        _, again, _ = check(seed, backend, world, without | {at})
        if again is not None and not again.startswith(CONDITIONED):
            without, wrong = without | {at}, again
    return f"{what} {wrong}"


if __name__ == "__main__":
    one = Backend(sys.argv[2])
    with one.session():
        print(shrunk(int(sys.argv[1]), one))
