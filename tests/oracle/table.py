"""One case of the table: a random layer with random options over an ugly graph, in one mode."""

from __future__ import annotations

import contextlib
import copy
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import composed, earlier, layers, typed_layers
from .backends import Backend, off
from .graphs import Case, Draw, with_one_weight_a_loop
from .judge import (
    CONDITIONED,
    OF_A_TERM,
    SMALL,
    SMALL_IN_FP64,
    Finding,
    Results,
    beyond,
    differing,
    near,
    nudged,
)
from .modes import MODES, Mode, call_and_write_inputs, prepared, run
from .trees import as_long, has_int32, layers_in_a_row, longest_sum, placed, tree_map

LOOKS = (
    8  # draws of other numbers over which errors are averaged, where one draw is beyond the rule
)

#: What torch says of a tensor that was written to before backward, which needs it.
WRITTEN = "has been modified by an inplace operation"
NUDGES = 4  # of each of these draws, for what rounding the inputs does to the host

TABLE = {**layers.TABLE, **typed_layers.TABLE, **composed.TABLE}
#: Layers that have kernels of their own come more often, those that mostly run natively less often.
OFTEN = {
    **dict.fromkeys(("GATConv", "SAGEConv"), 4),
    **dict.fromkeys(("GATConv edges", "GATv2Conv", "TransformerConv", "EGConv", "RGCNConv"), 3),
    **dict.fromkeys(("GATConv pair", "GATv2Conv edges", "TransformerConv edges", "GCNConv"), 2),
    **dict.fromkeys(("SAGEConv pair", "GraphConv", "PNAConv", "PNAConv edges", "GENConv"), 2),
    **dict.fromkeys(("RGATConv", "HGTConv"), 2),
    **dict.fromkeys(("CGConv", "EdgeConv", "FeaStConv", "GMMConv", "GeneralConv", "NNConv"), 0.4),
    **dict.fromkeys(("HypergraphConv", "PANConv", "FAConv"), 0.4),
}


def drawn(seed: int, only: str = "") -> tuple[str, str]:
    """The layer and the mode of a case."""
    r = random.Random(f"table {seed}")
    names = [name for name in TABLE if only in name]
    name = r.choices(names, [OFTEN.get(name, 1) for name in names])[0]
    return name, r.choices(list(MODES), [mode.often for mode in MODES.values()])[0]


def check(seed: int, backend: Backend, name: str = "", mode: str = "") -> tuple[str, str | None]:
    """What was run, and what is wrong: None; "refused" where the host does not run it either."""
    chance = drawn(seed, name if name not in TABLE else "")
    name, mode = name if name in TABLE else chance[0], mode or chance[1]
    build = lambda look: TABLE[name](Draw(f"{name} {seed}", look))  # noqa: E731
    return f"{name} --mode {mode}", judged(build, seed, mode, backend)


def judged(build: Callable[[int], Case], seed: int, mode: str, backend: Backend) -> str | None:
    """What is wrong with a case. ``build(look)`` makes it, for each ``look`` with other numbers.

    "refused" where the host does not run it either.
    """
    new, before = earlier.drawn(seed)
    if new:
        earlier.forget()
    try:
        found = _verdict(Trial(build, seed, MODES[mode], backend, MODES.get(before)))
        return found if before is None or found in (None, "refused") else f"{found} | after {before}"
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Trial:
    """A case in a mode on a backend. ``before``: the mode of an earlier call, if there is one."""

    build: Callable[[int], Case]
    seed: int
    mode: Mode
    backend: Backend
    before: Mode | None = None

    def case(self, look: int = 0) -> Case:
        """The case on the device. ``look``: with other numbers."""
        case, device = self.build(look), self.backend.device
        with torch.no_grad():
            for p in case.module.parameters():  # what starts as a constant would hide its loss
                if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                    p.add_(torch.randn_like(p) * 0.3)
        if device.type == "cuda":
            case = with_one_weight_a_loop(case)
        args, kwargs = (placed(part, device) for part in (case.args, case.kwargs))
        return prepared(Case(case.module.to(device), args, kwargs, case.note), self.mode)

    def floor(self, case: Case) -> float:
        """The error that is allowed whatever the host's is."""
        edges = 0 if self.mode.dtype == torch.float64 else longest_sum((case.args, case.kwargs))
        return max(self.mode.floor, OF_A_TERM * edges * max(1, layers_in_a_row(case.module)))

    @property
    def small(self) -> float:
        """Below which share of the largest gradient one is measured against that share."""
        return SMALL_IN_FP64 if self.mode.dtype == torch.float64 else SMALL

    def out_of_range(self) -> bool:
        """Whether the host's own layer reads past an end: on a GPU that ends the process."""
        case, cpu = self.build(0), torch.device("cpu")
        args, kwargs = (as_long(placed(part, cpu)) for part in (case.args, case.kwargs))
        with off(), torch.no_grad():
            _, problem = attempt(lambda: case.module(*args, **kwargs))
        return problem is not None and "index" in problem.lower()

    def host(self, case: Case, mode: Mode | None = None) -> Results:
        """The host's own results, of the case as it is."""
        with off():
            found = self._run(case, mode or self.mode)
        self.backend.finish()
        return found

    def native(self, case: Case) -> Results:
        """The host's own results with indices in int64, with which it is right everywhere."""
        return self.host(Case(case.module, as_long(case.args), as_long(case.kwargs)))

    def nearby(self, case: Case) -> list[Results]:
        """The host's results for inputs and weights that are one rounding away."""
        found: list[Results] = []
        for seed in range(NUDGES):
            module = copy.deepcopy(case.module)
            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(nudged(p, seed, self._step(p)))
            args, kwargs = tree_map(lambda t, seed=seed: nudged(t, seed, self._step(t)),
                                    (case.args, case.kwargs))
            found.append(self.native(Case(module, args, kwargs, case.note)))
        return found

    def _step(self, tensor: torch.Tensor) -> float | None:
        """One rounding of a number, relative to it; None: of its own type."""
        return 2.0**-9 if self.mode.in_16_bits and tensor.element_size() > 2 else None

    def ours(self, case: Case) -> Results:
        with self.backend.splitting(self.seed), self.backend.on(**self.mode.options):
            found = self._run(case, self.mode, self.before.options if self.before else None)
        self.backend.finish()
        return found

    def _run(self, case: Case, mode: Mode, options: dict | None = None) -> Results:
        """The results; ``options``: of `enabled` in an earlier call, in place of none."""
        device = self.backend.device

        def before(module: torch.nn.Module) -> None:
            with contextlib.nullcontext() if options is None else self.backend.on(**options):
                attempt(lambda: earlier.call(module, case, self.before, device, self.seed))

        return run(case, mode, device, self.seed, None if self.before is None else before)

    def exact(self, case: Case) -> Results:
        """The host's own layer in fp64; in its place, where it does not run so, as it is."""
        mode = self.mode.exact()
        wide = prepared(Case(copy.deepcopy(case.module), as_long(case.args), as_long(case.kwargs)),
                        mode)
        found, problem = attempt(lambda: self.host(wide, mode))
        return self.native(case) if problem else found


def _verdict(trial: Trial) -> str | None:
    if trial.backend.device.type == "cuda" and trial.out_of_range():
        return "refused"
    case = trial.case()
    host, refusal = attempt(lambda: trial.native(case))
    got, problem = attempt(lambda: trial.ours(case))
    if refusal or problem:
        # kernels keep inputs where the host keeps what it gathered of them: torch raises an error
        written = trial.mode.call is call_and_write_inputs and WRITTEN in str(problem)
        return ("refused" if refusal or written or attempt(lambda: trial.host(case))[1]
                else f"raises {problem} | {case.note}")
    found = differing(got, host)
    if found is not None and has_int32((case.args, case.kwargs)):  # it may be the host's own
        given, refusal = attempt(lambda: trial.host(case))
        found = found if refusal else differing(got, given)
    if found is None and not near(got, host, trial.floor(case), trial.small):
        found = _measured(trial, case, got, host)
    return None if found is None else f"{found.text} | {case.note}"


def _measured(trial: Trial, case: Case, got: Results, host: Results) -> Finding | None:
    exact, floor = trial.exact(case), trial.floor(case)
    found = beyond([(got, host, exact)], floor, trial.small)
    if found is not None and has_int32(
        (case.args, case.kwargs)
    ):  # no better than the host with the same indices
        given, refusal = attempt(lambda: trial.host(case))
        found = found if refusal else beyond([(got, given, exact)], floor, trial.small)
    if found is not None and (found.rounding or trial.mode.in_16_bits):
        return _on_average(trial)
    return found


def _on_average(trial: Trial) -> Finding | None:
    """What is beyond the rule on average: in one draw the host may be right by luck."""
    cases = [trial.case(look) for look in range(1, LOOKS + 1)]
    draws = [(trial.ours(case), trial.native(case), trial.exact(case)) for case in cases]
    floor = trial.floor(cases[0])
    found = beyond(draws, floor, trial.small)
    if found is not None and (found.rounding or trial.mode.in_16_bits):
        near = [(*draw, *trial.nearby(case)) for draw, case in zip(draws, cases)]
        if beyond(near, floor, trial.small) is None:
            return Finding(CONDITIONED + found.text, rounding=True)
    return found


def fatal(problem: Exception) -> bool:
    """Whether the device can do nothing more in this process."""
    text = str(problem)  # of any CUDA error, it ends in advice on "device-side assertions"
    return "device-side assert triggered" in text or "illegal memory access" in text


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``call()`` gives, or what it raises, in words.

    A fault of the device goes on: nothing more can run in this process.
    """
    try:
        return call(), None
    except Exception as problem:
        if fatal(problem):
            raise
        last = traceback.extract_tb(problem.__traceback__)[-1]
        place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        return None, f"{type(problem).__name__}: {str(problem)[:200]} ({place})"
