"""The rule: an error of at most twice the host's own, both measured against its code in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-6
#: A sum of n numbers in fp32, one after the other, is off by n times this on average, relative to
#: itself, where a large number comes before equal small ones, as in the gradient of a maximum and
#: a mean; half of that where all are equal (`test_judge.py` measures both). Which sums are long
#: depends on whether a linear map comes before them or after, so an error of that size is no alarm
#: in any of a case's results.
OF_A_TERM = 2.0**-25
#: Share of the draws in which an error has to break the rule, besides on average: of a few draws
#: one may decide the average, when a gradient happens to be nearly zero in it.
OFTEN = 3 / 8
ROUNDING = 0.3  # from here on no luck of the host explains an error, ...
#: ... unless the host has few digits left itself: its error, relative to this very result
LOST = 0.03
#: gradients below this share of the largest one are measured against that share
SMALL = 1e-3
#: the same where the host's own fp64 is both truth and judged: its rounding of large terms that
#: cancel, such as those of hundreds of copies in a softmax, is no gradient to hold others against
SMALL_IN_FP64 = 0.1
#: Gradients below this share of the outputs are zero but for the rounding of larger terms, in fp64
#: as well: those are measured against the outputs.
NOTHING = 1e-12
#: What a text begins with that tells of an error beyond the rule which is no larger than twice the
#: host's own over inputs and weights one rounding away: counted and listed, but no alarm.
CONDITIONED = "ill-conditioned: "
Results = dict[str, "Tensor | None"]


@dataclass(frozen=True)
class Finding:
    """What is wrong with one result. ``rounding``: it may be that the host was lucky."""

    text: str
    rounding: bool = False


def is_alarm(wrong: str | None) -> bool:
    """Whether a case with this verdict is to be followed."""
    return wrong not in (None, "refused") and not str(wrong).startswith(CONDITIONED)


def nudged(tensor: Tensor, seed: int, step: float | None = None, apart: bool = False) -> Tensor:
    """The numbers, each one rounding up or down (or by ``step``, relative to it).

    Equal numbers stay equal: what cancels exactly does so in copies of a row, too. ``apart``: they
    do not, so that of equal messages any may be the largest.
    """
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        return tensor
    with torch.no_grad():
        wide = tensor.detach().double()
        phase = wide * 12_345.678 + seed
        if apart:
            phase += torch.arange(wide.numel(), device=wide.device).view(wide.shape) * 1.7
        away = torch.where(phase.sin() < 0, -wide, wide)
        # half an eps alone would round back
        step = 0.505 * torch.finfo(tensor.dtype).eps if step is None else step
        found = (wide + away * step).to(tensor.dtype)
    return found.requires_grad_(tensor.requires_grad)


def on_cpu(results: Results) -> Results:
    """The results on the CPU. One copy for each dtype: processes that share a GPU wait long for
    every copy."""
    found = dict(results)
    away = {k: t for k, t in results.items() if isinstance(t, Tensor) and t.device.type != "cpu"
            and t.layout == torch.strided}
    for dtype in {t.dtype for t in away.values()}:
        names = [k for k, t in away.items() if t.dtype == dtype]
        flat = torch.cat([away[k].detach().reshape(-1) for k in names]).cpu()
        for k, part in zip(names, flat.split([away[k].numel() for k in names])):
            found[k] = part.view(away[k].shape).requires_grad_(away[k].requires_grad)
    return found


def differing(got: Results, host: Results) -> Finding | None:
    """What differs in kind: names, types, shapes, missing gradients, whole numbers, infinities."""
    if got.keys() != host.keys():
        return Finding(f"results {sorted(got)} and not {sorted(host)}")
    for name, ours in got.items():
        theirs = host[name]
        if ours is not None and theirs is not None and ours.device != theirs.device:
            return Finding(f"{name}: on {ours.device} and not {theirs.device}")
    got, host = on_cpu(got), on_cpu(host)
    floats = [t for t in host.values() if t is not None and t.is_floating_point()]
    # where numbers of 16 bits overflow somewhere, the step is lost, and inf times 0 is NaN elsewhere
    overflow = any(t.element_size() == 2 and not bool(torch.isfinite(t).all()) for t in floats)
    for name, ours in got.items():
        text = _differs(name, ours, host[name], overflow)
        if text:
            return Finding(f"{name}: {text}")
    return None


def _differs(name: str, ours: Tensor | None, theirs: Tensor | None, overflow: bool) -> str | None:
    if ours is None or theirs is None:
        one = theirs if ours is None else ours
        if one is None or not one.numel() or float(one.detach().abs().max()) <= 1e-12:
            return None
        return f"{'no result' if ours is None else 'a result'}, unlike the host"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} and not {theirs.dtype} {tuple(theirs.shape)}"
    if name.startswith("out") and ours.requires_grad != theirs.requires_grad:
        return f"requires_grad is {ours.requires_grad}"
    if not ours.is_floating_point():
        return None if torch.equal(ours, theirs) else "other whole numbers"
    if not overflow and bool((torch.isfinite(theirs) & ~torch.isfinite(ours)).any()):
        return "not finite"
    return None


def distances(
    got: Results, host: Results, beside: Results | None = None, small: float = SMALL
) -> dict[str, float]:
    """How far each result of ``got`` is from that of ``host``, relative to the latter.

    Numbers that are not finite, there or in ``beside``, do not count. ``small``: see `SMALL`; 0 for
    errors relative to the very result, even where that is zero but for rounding.
    """
    got, host = on_cpu(got), on_cpu(host)
    beside = got if beside is None else on_cpu(beside)
    floats = {k: t for k, t in host.items() if t is not None and got[k] is not None
              and beside[k] is not None and t.is_floating_point()}
    floats = {k: t for k, t in floats.items() if t.numel()}
    norms = {k: _finite(t, t).norm().item() for k, t in floats.items()}
    largest = max((v for k, v in norms.items() if not k.startswith("out")), default=0.0)
    outputs = max((v for k, v in norms.items() if k.startswith("out")), default=0.0)
    largest = outputs if largest <= NOTHING * outputs else largest
    found = {}
    for name, theirs in floats.items():
        gap = ((_finite(got[name], theirs, got[name], beside[name])
                - _finite(theirs, theirs, got[name], beside[name])) .norm() .item())
        scale = norms[name]
        if not name.startswith("out"):
            scale = max(scale, small * largest)
            if small and norms[name] <= 1e-9 * largest:  # zero, but for rounding of larger terms
                scale = largest
        found[name] = gap / (scale or 1.0) if gap else 0.0
    return found


def _finite(value: Tensor, *also: Tensor) -> Tensor:
    """``value`` in fp64 with zeros where any of ``also`` is not finite: there nothing is judged."""
    keep = torch.isfinite(also[0])
    for other in also[1:]:
        keep = keep & torch.isfinite(other)
    return torch.where(keep, value.detach().double(), 0.0)


def near(got: Results, host: Results, floor: float, small: float = SMALL) -> bool:
    """Whether the rule holds anyhow: what is as near to the host as the floor cannot break it."""
    return all(gap <= floor for gap in distances(got, host, small=small).values())


def beyond(draws: list[tuple[Results, ...]], floor: float, small: float = SMALL) -> Finding | None:
    """The worst result whose error is more than the rule allows.

    Errors are averaged over ``draws`` of (got, host, truth), and count if they come `OFTEN`. What
    comes after these in a draw are the host's results over nudged inputs (`nudged`): its error is
    the largest of theirs.
    """
    pairs = [
        (
            # what is no number in the host's results has no error there
            distances(got, truth, host, small),
            _larger(distances(host, truth, small=small),
                    [distances(n, truth, small=small) for n in near]),
        )
        for got, host, truth, *near in draws
    ]
    worst, found = 1.0, None
    for name in {name for ours, _ in pairs for name in ours}:
        mine = [ours.get(name, 0.0) for ours, _ in pairs]
        theirs = [host.get(name, 0.0) for _, host in pairs]
        ratio = _mean(mine) / (2 * _mean(theirs) + floor)
        often = sum(not a <= 2 * b + floor for a, b in zip(mine, theirs))
        if not ratio <= worst and often >= OFTEN * len(pairs):  # so that NaN is found
            worst = ratio
            alone = [distances(draw[1], draw[2], small=0.0) for draw in draws]
            lost = _mean([one.get(name, 0.0) for one in alone])
            found = Finding(f"{name}: error {_mean(mine):.2e}, the host's {_mean(theirs):.2e}",
                            rounding=_mean(mine) < ROUNDING or lost > LOST)
    return found


def _larger(host: dict[str, float], near: list[dict[str, float]]) -> dict[str, float]:
    return {k: max(v, *(one.get(k, 0.0) for one in near)) if near else v for k, v in host.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
