"""Layers over random metagraphs, with gnnaccel enabled, compared with a computation in fp64.

The computation in fp64 goes relation by relation.

    python -m tests.oracle.metagraphs --seed 7         one case again
    python -m tests.oracle.metagraphs --seeds 0:3000   many; also: --seconds 60
    ... --emulated                                     CUDA kernels, emulated on the CPU
    ... --when profitable                              only what is estimated to be faster
    ... --only HeteroConv                              one kind of layer

The rule: the error of every output, and of the gradient of every input and parameter, is at most
twice the host's error plus 1e-6, or plus more where sums are long (`judge.OF_A_TERM`).
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gnnaccel
from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.structures import structure
from gnnaccel.dispatch.graph import view as graph_view
from gnnaccel.dispatch.plan import planner
from gnnaccel.dispatch.relational import edges as relational_edges, pair_maps, pairs
from gnnaccel.dispatch.run import attention_families, skinny_matmul, torch_pairs, torch_segments
from tests.oracle import judge, metagraph_dgl
from tests.oracle import metagraph_draws as draws
from tests.oracle import metagraph_pyg
from tests.oracle.judge import CONDITIONED, nudged, on_cpu
from tests.oracle.metagraph_draws import Case
from tests.oracle.trees import layers_in_a_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MODES = ["train", "train", "train", "again", "again", "only x", "some results", "no_grad",
         "inference", "fp64", "twice derived", "in place"]
FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}
NUDGES = 2  # of each draw, where these tell whether it is the inputs' rounding
NUDGES_APART = 8  # of one draw, where these tell whether one of equal messages is the largest
DRAWS = 10  # of features, over which errors are averaged before they make an alarm
# of these draws in which an error has to be beyond its limit: in a single draw, one rounding may
# decide a product of many numbers
OFTEN = 4
WRONG = 1e-2  # an error that is no matter of rounding
SMALL = 1e-3  # gradients below this share of the largest are measured against that share
# a gradient below this share of the largest is zero but for the rounding of larger terms
NOTHING = 1e-9

#: sizes from which on things are done in another way, and what brings that to small graphs
THRESHOLDS = [(pair_maps, "WORTH_FROM", 0), (pairs, "AT_ONCE", -1), (graph_view, "SORT_FROM", 1),
              (torch_segments, "FOLD", 0), (torch_pairs, "BLOCK_BYTES", 512),
              (relational_edges, "_KEEP_BELOW", 0), (attention_families, "_KEPT_SHARE", 0),
              (skinny_matmul, "TALL", 1), (structure, "chunk_edges", lambda edges: 16)]

Results = dict[str, Any]  # tensors, None where there is no gradient
seen: Counter[str] = Counter()  # how the cases ended


def applicable() -> bool:
    """Whether there is a host to check."""
    return find_spec("torch_geometric") is not None


def _dgl() -> bool:
    return find_spec("dgl") is not None and DEVICE.type == "cpu"


def drawn(seed: int, only: str | None = None) -> tuple[str, Callable[..., Case]]:
    """The kind of layer of this seed, the same on all machines."""
    makers = {**metagraph_pyg.CASES, **metagraph_dgl.CASES}
    weights = {"HeteroConv": 5, "HeteroGraphConv": 4, "to_hetero": 2}
    names = ([only] if only
             else random.Random(f"kind-{seed}").choices(list(makers),
                                                        [weights.get(k, 1) for k in makers]))
    return names[0], makers[names[0]]


def check(seed: int, enable: Callable[[], contextlib.AbstractContextManager],
          only: str | None = None) -> str | None:
    """What is wrong with this seed's case, or None. ``enable()``: a block with gnnaccel enabled."""
    kind, make = drawn(seed, only)
    if kind in metagraph_dgl.CASES and not _dgl():
        seen["no dgl here"] += 1
        return None
    r = random.Random(f"metagraph-{seed}")
    torch.manual_seed(seed)
    mode = r.choice(MODES)
    if mode == "twice derived" and kind in metagraph_dgl.CASES:
        mode = "train"  # DGL's own second derivatives leave terms out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with gnnaccel.disabled():
                before = r.getstate()
                case = make(r, DEVICE)
                if DEVICE.type != "cpu":  # so many small operations are faster on a CPU
                    case = case._replace(truth=make(_random_at(before), torch.device("cpu")).truth)
                case = _placed(case, seed, r, mode)
                exact = copy.deepcopy(case.module).cpu().double()
            with contextlib.ExitStack() as changed:
                for where, name, value in r.sample(THRESHOLDS, r.choice([0, 0, 2, 4])):
                    changed.enter_context(mock.patch.object(where, name, value))
                wrong = _judged(
                    lambda seed, near=0, apart=False: _draw(case, exact, seed, mode, enable, near,
                                                            apart),
                    seed, case.host, _floor(case), takes_extrema(case.module))
        except Exception as error:
            # gnnaccel's own errors are caught in `_draw`: this one is a defect of the drawn case
            return f"{kind}: no case, {_raised(error)} [{_command(seed, only)}]"
    if wrong is None:
        return None
    start = CONDITIONED if wrong.startswith(CONDITIONED) else ""
    return f"{start}{case.text}; {mode}: {wrong.removeprefix(start)} [{_command(seed, only)}]"


def _random_at(state: Any) -> random.Random:
    found = random.Random()
    found.setstate(state)
    return found


def _raised(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (f"{type(error).__name__}: {str(error)[:200]} "
            f"({where.filename.rpartition('/')[2]}:{where.lineno})")


def _command(seed: int, only: str | None) -> str:
    emulated = " --emulated" if driver.placed() else ""
    return (f"python -m tests.oracle.metagraphs --seed {seed}{emulated}"
            + (f" --only {only}" if only else ""))


def _placed(case: Case, seed: int, r: random.Random, mode: str) -> Case:
    """On the device, with all parameters there and random."""
    dtype = torch.float64 if mode == "fp64" else torch.float32
    module = case.module.to(DEVICE)
    if any(torch.nn.parameter.is_lazy(p) for p in module.parameters()):
        with torch.no_grad():
            case.call(module, {k: t.to(DEVICE) for k, t in draws.features(case.x, seed).items()})
    draws.spread(module, r)
    for p in module.parameters():
        if mode == "only x" and not torch.nn.parameter.is_lazy(p):
            # a lazy parameter belongs to a relation that the call leaves out
            p.requires_grad_(False)
    return case._replace(module=module.to(dtype).train(r.random() < 0.5))


# ---- one call ----

def _run(call: Callable, module: torch.nn.Module, x: dict[str, Tensor], seed: int,
         mode: str) -> Results:
    """The results ("out" and a name), and the gradients of all inputs and parameters that want one.
    """
    if mode in ("no_grad", "inference"):
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return on_cpu({f"out {k}": t.clone() for k, t in call(module, x).items()})
    r = random.Random(f"run-{seed}")
    x = {k: t.detach().requires_grad_(r.random() < 0.9) for k, t in x.items()}
    outs = call(module, x)
    if mode == "in place":  # as models do, where the host's own results allow it
        outs = {k: t.mul_(0.75).relu_() for k, t in outs.items()}
    used = ([k for k in sorted(outs) if mode != "some results" or r.random() < 0.5]
            or sorted(outs)[:1])
    loss = sum((_weighted(outs[k], f"{seed}-{k}") for k in used if outs[k].requires_grad),
               start=torch.zeros((), device=next((t.device for t in outs.values()), DEVICE)))
    found: Results = {f"out {k}": t.detach().clone() for k, t in outs.items()}
    found.update({f"wants {k}": t.requires_grad for k, t in outs.items()})
    leaves = {k: t for k, t in {**{f"x {k}": t for k, t in x.items()},
                                **dict(module.named_parameters())}.items()
              if t.requires_grad and not torch.nn.parameter.is_lazy(t)}
    if not leaves or not loss.requires_grad:
        return on_cpu(found)
    derived = mode == "twice derived"
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=derived,
                                allow_unused=True)
    found.update({f"d {k}": None if g is None else g.detach() for k, g in zip(leaves, grads)})
    total = (sum(g.pow(2).sum() for g in grads if g is not None and g.requires_grad) if derived
             else None)
    if isinstance(total, Tensor) and total.requires_grad:
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found.update({f"dd {k}": g for k, g in zip(leaves, grads)})
    return on_cpu(found)


def _weighted(out: Tensor, name: str) -> Tensor:
    g = draws.generator(random.Random(f"weights-{name}"))
    weights = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)
    return (out * weights).sum() + 0.5 * out.pow(2).sum()


# ---- the judgement ----

def takes_extrema(module: torch.nn.Module) -> bool:
    """Whether the largest or smallest of messages is taken: where several are equal, the rounding
    of what they are made of decides which gets the gradient."""
    graphs = [str(m.graph) for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    return (any(str(getattr(m, "aggr", None)) in ("max", "min") for m in module.modules())
            or any(f"torch.{name}" in text for text in graphs for name in ("max", "min")))


def _floor(case: Case) -> float:
    """The error that is allowed whatever the host's is."""
    dtype = next((p.dtype for p in _floats(case.module)), torch.float32)
    sums = judge.OF_A_TERM * case.longest * max(1, layers_in_a_row(case.module))
    return FLOOR[dtype] if dtype == torch.float64 else max(FLOOR[dtype], sums)


def _judged(draw: Callable, seed: int, host: bool, floor: float,
            extrema: bool = False) -> str | None:
    wrong, found, conditioned = {}, draw(seed), False
    if isinstance(found, tuple):
        wrong = _beyond([found], host, floor)
    # (where the host is as far off, rounding may have decided which of equal messages is the
    # largest)
    if wrong and all(error < WRONG or native >= WRONG for error, native, _ in wrong.values()):
        seeds = [seed + (1 + at) * 1_000_003 for at in range(DRAWS)]
        more = [draw(one) for one in seeds]
        numbers = [found for found in more if isinstance(found, tuple)]
        often = Counter(name for found in numbers for name in _beyond([found], host, floor))
        wrong = {k: v for k, v in _beyond(numbers, host, floor).items()
                 if k in wrong and often[k] >= OFTEN}
        found = next((found for found in more if isinstance(found, str)), found)
        if wrong and not isinstance(found, str):
            near = [found for one in seeds if isinstance(found := draw(one, NUDGES), tuple)]
            conditioned = not wrong.keys() & _beyond(near, host, floor).keys()
    if wrong and extrema and not isinstance(found, str):
        conditioned = conditioned or _by_ties(draw(seed, NUDGES_APART, True), wrong)
    if isinstance(found, str):
        return found
    seen["checked" if found is not None else "raises natively"] += 1
    if not wrong:
        return None
    name, (error, native, allowed) = max(wrong.items(), key=lambda item: item[1][0] / item[1][2])
    return (f"{CONDITIONED if conditioned else ''}{len(wrong)} wrong, worst: {name} has an error of "
            f"{error:.1e}, the host {native:.1e}, allowed {allowed:.1e}")


def _by_ties(near: Any, wrong: dict[str, tuple[float, float, float]]) -> bool:
    """Whether the host is as far off in ``wrong`` over features that are no longer equal, of which
    ``near`` are the results. Outputs do not jump where another message is the largest."""
    if not isinstance(near, tuple) or any(name.startswith("out") for name in wrong):
        return False
    return all(ours <= 2 * host for ours, host, _ in (_errors(name, *near) for name in wrong))


def _draw(case: Case, exact: torch.nn.Module, seed: int, mode: str,
          enable: Callable, near: int = 0,
          apart: bool = False) -> tuple[Results, ...] | str | None:
    """The results of gnnaccel, of the host, and of ``exact``: the layer in fp64, by relations.

    After them the host's for ``near`` nudges of inputs and weights (`judge.nudged`, ``apart``).
    A string says what is wrong where they cannot be compared. None: the host raises an error.
    """
    x = {k: t.to(DEVICE, next(_floats(case.module), torch.zeros(())).dtype)
         for k, t in draws.features(case.x, seed).items()}
    with gnnaccel.disabled():  # of the truth copies: a module's own result may not be changed
        try:
            native = _run(case.call, case.module, x, seed, mode)
        except Exception:
            native = None
        others = [] if native is None else [
            _run(case.call, _nudged(case.module, at),
                 {k: nudged(t, at, apart=apart) for k, t in x.items()}, seed, mode)
            for at in range(near)]
        truth = (None if native is None
                 else _run(lambda *of: {k: t.clone() for k, t in case.truth(*of).items()}, exact,
                           {k: t.cpu().double() for k, t in x.items()}, seed, mode))
    try:
        with enable():
            if mode == "again":
                with torch.no_grad():
                    case.call(case.module, {k: t.roll(1, 0) for k, t in x.items()})
            got = _run(case.call, case.module, x, seed, mode)
    except Exception as error:
        return None if native is None else f"raises {_raised(error)}"
    if native is None:
        return None
    # a gradient that no relation leads to is zero, whether or not the host's code gives one
    truth = {name: truth[name] if name in truth else torch.zeros(value.shape, dtype=torch.float64)
             for name, value in native.items()
             if name in truth or isinstance(value, Tensor) and name.startswith("d ")}
    return _unlike(got, native, truth, case.host) or (got, native, truth, *others)


def _nudged(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    module = copy.deepcopy(module)
    with torch.no_grad():
        for p in module.parameters():
            if not torch.nn.parameter.is_lazy(p):
                p.copy_(nudged(p, seed))
    return module


def _floats(module: torch.nn.Module) -> Iterator[Tensor]:
    return (p for p in module.parameters() if p.is_floating_point())


def _unlike(got: Results, native: Results, exact: Results, host: bool) -> str | None:
    """What no average can mend: other names, shapes, dtypes, or a gradient where there is none."""
    if list(got) != list(native) or got.keys() != exact.keys():
        return f"gives {list(got)}, the host {list(native)}, the truth {list(exact)}"
    for name, value in native.items():
        mine = got[name]
        if not isinstance(value, Tensor) or mine is None:
            if (mine is not value and (mine is None) != (value is None)
                or isinstance(value, bool) and mine != value):
                if host:
                    return f"{name} is {_told(mine)}, the host's {_told(value)}"
        elif (mine.shape, mine.dtype) != (value.shape, value.dtype):
            return (f"{name} is {mine.dtype}{list(mine.shape)}, "
                    f"the host's {value.dtype}{list(value.shape)}")
    return None


def _told(value: Any) -> str:
    return (f"a tensor of norm {value.norm().item():.1e}" if isinstance(value, Tensor)
            else str(value))


def _beyond(found: list[tuple[Results, ...]], host: bool,
            floor: float) -> dict[str, tuple[float, float, float]]:
    """(error, the host's error, the limit) of whatever is beyond its limit; errors are averaged."""
    wrong, tensors = {}, ([k for k, t in found[0][0].items() if isinstance(t, Tensor)]
                          if found else [])
    for name in tensors:
        rows = [_errors(name, *results) for results in found
                if isinstance(results[0].get(name), Tensor)]
        mine, native, scale = (sum(v * v for v in column) ** 0.5 for column in zip(*rows))
        mine, native = mine / (scale or 1.0), native / (scale or 1.0)
        allowed = 2 * native + floor if host else 20 * floor
        if not math.isfinite(native):  # the host's result is no number either
            continue
        if not host and abs(mine - native) <= SMALL * native:
            # what runs natively is as the host has it
            continue
        if host and all(_same(name, *results[:2]) for results in found):
            # no rule can break; where messages are equal, another of them may be the largest in
            # fp64
            continue
        if not (mine <= allowed and (native < WRONG or mine <= floor or not host)):
            # (a host that is as wrong as `WRONG` means that the truth is wrong, unless we agree
            # with it)
            wrong[name] = mine, native, allowed
    return wrong


def _same(name: str, got: Results, native: Results) -> bool:
    """Whether the result is the host's own but for rounding."""
    mine, theirs = got.get(name), native.get(name)
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return False
    limit = FLOOR[mine.dtype] * theirs.double().norm().item()
    return (mine.double() - theirs.double()).norm().item() <= limit


def _errors(name: str, got: Results, native: Results, exact: Results,
            *near: Results) -> tuple[float, float, float]:
    """Errors in the L2 norm, and what they are relative to. The host's is the root mean square
    over its nudged results ``near``, where that is larger."""
    truth = exact[name]
    truth = torch.zeros_like(got[name], dtype=torch.float64) if truth is None else truth
    scale = truth.norm().item()
    if name.startswith("d"):
        order = name.split()[0]
        same = [t.norm().item() for k, t in exact.items()
                if isinstance(t, Tensor) and k.split()[0] == order]
        largest = max(same, default=0.0)
        outputs = max(t.norm().item() for k, t in exact.items() if k.startswith("out "))
        largest = outputs if largest <= judge.NOTHING * outputs else largest
        scale = largest if scale <= NOTHING * largest else max(scale, SMALL * largest)
    host, *others = [
        (one[name].double() - truth).norm().item() if isinstance(one.get(name), Tensor) else 0.0
        for one in (native, *near)]
    host = max(host, (sum(v * v for v in others) / len(others)) ** 0.5) if others else host
    return (got[name].double() - truth).norm().item(), host, scale


# ---- by hand ----

@contextlib.contextmanager
def _emulated() -> Iterator[None]:
    from tests.emulation.emulator import EmulatedDriver

    with driver.using(EmulatedDriver()):
        planner.forget()
        yield
    planner.forget()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:1000000")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--when", default="supported", choices=["supported", "profitable"])
    parser.add_argument("--only")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    options = dict(when=asked.when)
    if asked.emulated or DEVICE.type == "cuda":
        options["backend"] = "cuda"
    first, last = ((asked.seed, asked.seed + 1) if asked.seed is not None
                   else map(int, asked.seeds.split(":")))
    alarms, until, routes = 0, time.monotonic() + asked.seconds, Counter()
    with _emulated() if asked.emulated else contextlib.nullcontext(), gnnaccel.enabled(**options):
        for seed in range(first, last):
            if time.monotonic() > until:
                break
            found = check(seed, contextlib.nullcontext, asked.only)
            for name, entry in gnnaccel.stats().items():
                routes.update({f"{name} {route}": n for route, n in entry["routes"].items()})
            gnnaccel.reset_stats()
            if found is not None:
                alarms += judge.is_alarm(found)
                print(f"{'ALARM ' if judge.is_alarm(found) else ''}{found}", flush=True)
            if seed % 500 == 499:
                print(f"seed {seed}: {alarms} alarms", flush=True)
    print(f"seeds {first} to {seed}: {alarms} alarms; {dict(seen)}; "
          f"calls: {dict(routes.most_common())}")
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
