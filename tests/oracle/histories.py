"""Random histories of one model: after each edit its results are the host's over fresh copies."""

from __future__ import annotations

import contextlib
import copy
import random
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from . import edits, edits_calls, edits_inputs, edits_models  # noqa: F401  (they register)
from .backends import Backend, off
from .graphs import one_weight_a_loop
from .judge import CONDITIONED, ROUNDING, Results, beyond, differing, distances, nudged
from .models import IN, MODELS, SIZES
from .table import attempt, fatal
from .trees import as_dtype, dense_float, named, tree_map

STEPS = 12
#: What is remembered wrongly differs by far more. The host may be right by luck, which a history
#: cannot average out.
FLOOR = 1e-4
#: In autocast. Scores rounded to bf16 move a softmax as a whole, and with it all gradients that
#: come
#: through it; so there each result may also be off by twice the host's largest error in any of
#: them.
LOW_FLOOR = 5e-2
NUDGES = 6  # of the inputs, over which the host's errors are averaged
CAPTURED = 0.3  # of all histories
REPEATED = 5  # calls before one whose results are compared, where calls may be captured
DRAWS = 8  # of features, over which errors are averaged that may be rounding
WRONG = 1e-2  # an error that is no matter of rounding: an old answer is further off


class History:
    """A model, its inputs, and how it is called. Edits change any of it."""

    def __init__(self, seed: int, backend: Backend, name: str = ""):
        self.choose = random.Random(f"history {seed}")
        torch.manual_seed(seed)
        self.backend, self.device = backend, backend.device
        self.name = name or self.choose.choice(sorted(MODELS))
        self.make, self.edge = MODELS[self.name]
        self.model = self.new_model().train(self.choose.random() < 0.3)
        self.spare = self.new_model()
        self.nodes, self.edges = 20, 80
        # for some, calls that repeat are replayed
        captured = random.Random(f"captured {seed}").random() < CAPTURED
        self.options: dict = {"capture": True} if captured else {}
        self.hooks: list = []
        self.undo: list = []  # puts back what edits replaced in classes
        self.grad, self.grad_x, self.autocast, self.checks = True, True, False, 0
        self.conditioned: str | None = None  # the last finding that is due to its inputs' rounding
        self.learned = False  # whether features are a Parameter
        self.log: list[str] = []
        self.new_graph()

    # ---- inputs ----

    def new_model(self) -> nn.Module:
        return self.make().to(self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.device)

    def random_edges(self, key: tuple | None = None) -> Tensor:
        ends = self.ends(key)
        return torch.stack([torch.randint(0, n, (self.edges,)) for n in ends]).to(self.device)

    def ends(self, key: tuple | None) -> tuple[int, int]:
        if key is None:
            return self.nodes, self.nodes
        return tuple(self.nodes if t == "a" else SIZES[t] for t in (key[0], key[2]))

    def new_graph(self) -> None:
        """Other features, edges and weights, in new memory."""
        if self.edge == "types":
            from .models import EDGE_TYPES

            self.x: Any = {t: self.normal(self.ends((t, "", t))[0], IN) for t in ("a", "b")}
            self.edge_index: Any = {e: self.random_edges(e) for e in EDGE_TYPES}
            self.values = None
            return
        self.x, self.edge_index = self.normal(self.nodes, IN), self.random_edges()
        self.new_values()

    def new_values(self) -> None:
        made = {
            "weight": lambda: torch.rand(self.edges) + 0.1,
            "attr": lambda: torch.randn(self.edges, 3),
            "relation": lambda: torch.randint(0, 3, (self.edges,)),
        }.get(self.edge)
        self.values = None if made is None else made().to(self.device)

    def some_edges(self) -> tuple[Tensor, int, int]:
        """The edges of one type, with the numbers of nodes at their ends."""
        if self.edge != "types":
            return self.edge_index, self.nodes, self.nodes
        key = self.choose.choice(sorted(self.edge_index))
        return self.edge_index[key], *self.ends(key)

    def call(
        self, model: nn.Module, x: Any = None, edge_index: Any = None, values: Tensor | None = None
    ) -> Any:
        args = self.x if x is None else x, self.edge_index if edge_index is None else edge_index
        values = self.values if values is None else values
        return model(*args) if values is None else model(*args, values)

    # ---- checks ----

    def results(
        self, fresh: bool, dtype: torch.dtype | None = None, nudge: int | None = None
    ) -> Results:
        """Outputs and gradients. ``fresh``: over copies of the inputs, of which nothing is
        remembered; ``nudge``: over numbers that are one rounding away (`judge.nudged`)."""
        edge_index, values, model = self.edge_index, self.values, self.model
        if fresh:
            edge_index = tree_map(Tensor.clone, edge_index)
            values = (None if values is None
                      else values.detach().clone().requires_grad_(values.requires_grad))
        x = (tree_map(lambda t: t.detach().clone().requires_grad_(self.grad_x), self.x) if fresh
             or self.grad_x else self.x)
        if self.learned and not fresh:
            x = tree_map(lambda t: nn.Parameter(t.detach().clone(), self.grad_x), x)
        if dtype is not None:
            model = copied(model).to(dtype)
            x, values = (tree_map(lambda t: t.detach().requires_grad_(t.requires_grad),
                                  as_dtype(v, dtype)) for v in (x, values))
            x = tree_map(lambda t: t.requires_grad_(self.grad_x), x)
            if values is not None and dense_float(values):
                values.requires_grad_(self.values.requires_grad)
        if nudge is not None:
            model, x, values = self._nudged(nudge, model, x, values)
        torch.manual_seed(3)
        cast = self.autocast and dtype is None
        context = (torch.autocast(self.device.type, dtype=torch.bfloat16) if cast
                   else contextlib.nullcontext())
        with torch.set_grad_enabled(self.grad), context:
            found = named(self.call(model, x, edge_index, values))
        return {**found, **self._gradients(model, found, x, values)}

    def _nudged(self, seed: int, model: nn.Module, x: Any, values: Tensor | None) -> tuple:
        step, model = 2.0**-9 if self.autocast else None, copied(model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(nudged(p, seed, step))
        x, values = tree_map(lambda t: nudged(t, seed, step), (x, values))
        return model, x, values

    def _gradients(self, model: nn.Module, outs: Results, x: Any, values: Tensor | None) -> Results:
        wrt = {**named(x, "x"), **dict(model.named_parameters()), "values": values}
        wrt = {f"gradient of {k}": t for k, t in wrt.items() if t is not None and t.requires_grad}
        terms = []
        for t in outs.values():
            if t.requires_grad:
                weight = torch.linspace(
                    -1, 2, t.numel(), device=t.device, dtype=torch.float64
                ).cos()
                terms.append((t.double() * weight.view(t.shape)).sum())
        if not wrt or not terms:
            return {}
        return dict(zip(wrt,
                        torch.autograd.grad(sum(terms), list(wrt.values()), allow_unused=True)))

    def check(self) -> str | None:
        """What is wrong with the model's results now."""
        self.checks += 1
        if self.device.type == "cuda" and self.edge == "weight":
            self.one_weight_a_loop()
        if self.model.training and any(
            isinstance(getattr(m, "dropout", 0), float) and m.dropout for m in self.model.modules()
        ):
            with self.backend.on(**self.options):
                attempt(lambda: self.results(False))
            return None
        with off():
            host, refusal = attempt(lambda: self.results(True))
        with self.backend.on(**self.options):
            for _ in range(REPEATED if self.options.get("capture") else 0):
                attempt(lambda: self.results(False))
            got, problem = attempt(lambda: self.results(False))
        self.backend.finish()
        if refusal or problem:
            return None if refusal else f"raises {problem}"
        found = differing(got, host)
        floor = LOW_FLOOR if self.autocast else FLOOR
        if found or all(gap <= floor for gap in distances(got, host).values()):
            return found and found.text
        with off():
            exact, problem = attempt(lambda: self.results(True, torch.float64))
        truth = host if problem or exact.keys() != host.keys() else exact
        if self.autocast:
            floor = max(floor, 2 * max(distances(host, truth).values(), default=0.0))
        found = beyond([(got, host, truth)], floor)
        if found is not None and self._by_luck(got, truth, floor):
            return None
        if found is not None and self._by_rounding(got, host, truth, floor):
            self.conditioned = CONDITIONED + found.text
            return None
        return found and found.text

    def one_weight_a_loop(self) -> None:
        """Give all self loops of a node one weight, as `graphs.with_one_weight_a_loop` does."""
        with torch.inference_mode(self.values.is_inference()):
            one_weight_a_loop(self.edge_index, self.values)

    def _by_luck(self, got: Results, truth: Results, floor: float) -> bool:
        """Whether the rule holds on average over other features."""
        if any(gap > WRONG for gap in distances(got, truth).values()):
            return False
        draws, x = [], self.x
        try:
            for seed in range(DRAWS):
                torch.manual_seed(seed)
                self.x = tree_map(_like, x)
                with off():
                    host, truth = self.results(True), self.results(True, torch.float64)
                with self.backend.on(**self.options):
                    draws.append((self.results(False), host, truth))
                self.backend.finish()
        finally:
            self.x = x
        return (not any(differing(got, host) for got, host, _ in draws)
                and beyond(draws, floor) is None)

    def _by_rounding(self, got: Results, host: Results, truth: Results, floor: float) -> bool:
        """Whether the host is as far off when its inputs are one rounding away."""
        with off():
            near = [attempt(lambda n=n: self.results(True, nudge=n))[0] for n in range(NUDGES)]
        near = [one for one in near if one is not None and one.keys() == host.keys()]
        if near and beyond([(got, host, truth, *near)], floor) is None:
            return True
        return self.autocast and self._by_casts(got, host, truth, floor)

    def _by_casts(self, got: Results, host: Results, truth: Results, floor: float) -> bool:
        """Whether gradients differ because a cast takes a number to the other side of zero, as of
        a ReLU: outputs are right, and so are all results of the same call without autocast."""
        gaps = distances(got, truth)
        if any(gap > (floor if name.startswith("out") else ROUNDING)
               for name, gap in gaps.items()):
            return False
        self.autocast = False
        try:
            with off():
                host, truth = self.results(True), self.results(True, torch.float64)
            with self.backend.on(**self.options):
                got = self.results(False)
            self.backend.finish()
        finally:
            self.autocast = True
        return differing(got, host) is None and beyond([(got, host, truth)], FLOOR) is None

    def finish(self) -> None:
        for put_back in reversed(self.undo):
            put_back()
        for hook in self.hooks:
            hook.remove()
        torch.use_deterministic_algorithms(False)
        import gnnaccel

        gnnaccel.reset_rules()


def _like(features: Tensor) -> Tensor:
    """Other numbers of the same size."""
    with torch.no_grad():
        found = features.roll(1, 0) * (1 + 0.2 * torch.randn(features.shape).to(features))
    return found.requires_grad_(features.requires_grad)


def copied(model: nn.Module) -> nn.Module:
    """A copy, also of a layer that keeps a result of its last call, as `SuperGATConv` does."""
    kept = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return copy.deepcopy(model, {id(t): t.detach() for t in kept if not t.is_leaf})


def check(
    seed: int, backend: Backend, name: str = "", mode: str = ""
) -> tuple[str, str | None, int]:
    """What was run, what is wrong with it, and how many checks were made."""
    history = History(seed, backend, name)
    try:
        found = history.check() or history.check()
        for _ in range(STEPS):
            if found:
                break
            what = edits.apply(history)
            history.log.append(what)
            for _ in range(history.choose.choice((1, 1, 2, 3))):
                found = found or history.check()
    except Exception as problem:
        if fatal(problem):
            raise
        found = "the history itself: " + traceback.format_exc()[-500:].replace("\n", " | ")
    finally:
        history.finish()
    found = found or history.conditioned
    text = found and f"{found} | after {'; '.join(history.log[-8:]) or 'nothing'}"
    return history.name, text, history.checks
