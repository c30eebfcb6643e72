"""What the runs say: paired differences with confidence intervals, and whether two precisions are
equivalent."""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: quantiles of Student's t at 0.975, by degrees of freedom from 1
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
      2.052, 2.048, 2.045, 2.042)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval; infinite for fewer than two
    values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    t = _T[min(len(values) - 1, len(_T)) - 1]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def against(reference: Sequence[float], other: Sequence[float], margin: float) -> dict:
    """Points of accuracy of ``other`` over ``reference``, seed by seed. Equivalent: the interval
    lies within the margin."""
    points = [100 * (b - a) for a, b in zip(reference, other)]
    mean, half = interval(points)
    return {"mean": mean, "half_width": half, "worst_seed": min(points), "points": points,
            "margin": margin, "equivalent": abs(mean) + half <= margin}


def table(cells: Sequence[dict], sides: Sequence[str]) -> str:
    """Markdown: one row per cell and precision."""
    lines = ["| graph | model | precision | test accuracy | against fp32, points "
             "(95 % CI) | worst seed | within | in fp32 |",
             "|---|---|---|---|---|---|---|---|"]
    for cell in cells:
        for side in sides:
            found = cell["sides"][side]
            mean, half = interval([100 * run["accuracy"] for run in found["runs"]])
            versus = found.get("against_fp32")
            shares = [found[name] for name in ("share_in_fp32", "maps_in_fp32")
                      if found[name] is not None]
            told = (("-", "-", "-") if versus is None else (
                f"{versus['mean']:+.2f} ± {versus['half_width']:.2f}",
                f"{versus['worst_seed']:+.2f}",
                f"±{versus['margin']:g}: {'yes' if versus['equivalent'] else 'no'}"))
            lines.append(f"| {cell['graph']} | {cell['model']} | {side} | {mean:.2f} ± "
                         f"{half:.2f} | {' | '.join(told)} | "
                         f"{', maps '.join(f'{share:.0%}' for share in shares) or '-'} |")
    return "\n".join(lines)
