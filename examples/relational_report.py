"""Native and accelerated runs of several seeds, put side by side: numbers, a table for the
terminal, one in Markdown."""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

SIDES = ("native", "gnnaccel")
HEADER = ("dataset, layer", "native", "with gnnaccel", "difference", "paired", "ms per epoch",
          "faster", "calls, and why native")


@dataclass
class Run:
    """One training: of one seed, on one side."""

    accuracy: float  # on the test nodes, after the last epoch; between 0 and 1
    loss: float  # of the last epoch
    epoch_s: float  # median of the epochs after the warm-up
    first_epoch_s: float  # with compiling, allocating and building structures


@dataclass
class Decisions:
    """Where gnnaccel sent the calls of the relational layers, over all seeds."""

    calls: int  # that the models made
    routes: dict[str, int] = field(default_factory=dict)  # of the calls that gnnaccel saw
    # reason code -> calls that went native for it
    reasons: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # reason code -> what a record said
    kernels: list[str] = field(default_factory=list)  # "forward RGCNConv: cuda, name"

    def add(self, stats: dict, layer: str) -> None:
        """Count what ``gnnaccel.stats()`` says of ``layer``."""
        entry = stats.get(layer, {"routes": {}, "reasons": {}})
        for mine, theirs in ((self.routes, entry["routes"]), (self.reasons, entry["reasons"])):
            for key, calls in theirs.items():
                mine[key] = mine.get(key, 0) + calls

    def describe(self, records: list[dict], layer: str) -> None:
        """Take kernels and the texts of reasons from records."""
        for record in records:
            if record["layer"] != layer:
                continue
            for item in record["rejected"]:
                self.texts.setdefault(item["code"], item["text"])
            if record["kernel"]:
                line = f"{record['direction']} {layer}: {record['route']}, {record['kernel']}"
                if line not in self.kernels:
                    self.kernels.append(line)

    def shares(self) -> dict[str, float]:
        """Of all calls, by route. "unseen" is what gnnaccel never got: layers it does not know run
        natively."""
        seen = sum(self.routes.values())
        calls = {**self.routes, "unseen": max(0, self.calls - seen)}
        return {route: n / max(self.calls, seen) for route, n in sorted(calls.items()) if n}


def summarize(native: Sequence[Run], fast: Sequence[Run], decisions: Decisions) -> dict:
    """Everything that the tables show, and the runs behind it. The runs are in the order of the
    seeds, on both sides."""
    sides = {side: _side(runs) for side, runs in zip(SIDES, (native, fast))}
    differences = [b.accuracy - a.accuracy for a, b in zip(native, fast, strict=True)]
    mean, spread = statistics.mean(differences), sides["native"]["accuracy_std"]
    deviation = _std(differences)
    return {
        **sides,
        "difference": {
            "mean": mean,  # of the means, which is also the mean of the paired differences
            "in_native_std": mean / spread if spread else None,
            "paired_std": deviation,
            "paired_standard_error": None if deviation is None else deviation / math.sqrt(len(differences)),
            "seeds_equal": sum(difference == 0 for difference in differences),
        },
        "speedup": sides["native"]["epoch_s"] / sides["gnnaccel"]["epoch_s"],
        "calls": {"total": decisions.calls, "shares": decisions.shares(), "kernels": decisions.kernels,
                  "reasons": {code: {"calls": calls, "text": decisions.texts.get(code)}
                              for code, calls in sorted(decisions.reasons.items())}},
    }


def _side(runs: Sequence[Run]) -> dict:
    accuracies = [run.accuracy for run in runs]
    return {"accuracy_mean": statistics.mean(accuracies), "accuracy_std": _std(accuracies),
            "epoch_s": statistics.median(run.epoch_s for run in runs),
            "runs": [asdict(run) for run in runs]}


def _std(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


# -- tables ----------------------------------------------------------------------------------------

def cells(result: dict) -> list[str]:
    """A row under `HEADER`."""
    native, fast, difference = result["native"], result["gnnaccel"], result["difference"]
    in_std, error = difference["in_native_std"], difference["paired_standard_error"]
    seeds = len(native["runs"])
    return [
        f"{result['dataset']}, {result['layer']}",
        _percent(native["accuracy_mean"], native["accuracy_std"]),
        _percent(fast["accuracy_mean"], fast["accuracy_std"]),
        f"{100 * difference['mean']:+.2f}" + ("" if in_std is None else f" ({in_std:+.2f} std)"),
        (""
         if error is None
         else f"±{100 * error:.2f}; ") + f"{difference['seeds_equal']} of {seeds} equal",
        f"{1000 * native['epoch_s']:.1f} -> {1000 * fast['epoch_s']:.1f}",
        f"{result['speedup']:.2f}x",
        _calls(result["calls"]),
    ]


def _percent(mean: float, std: float | None) -> str:
    return f"{100 * mean:.2f}" + ("" if std is None else f" ± {100 * std:.2f}")


def _calls(calls: dict) -> str:
    routes = [f"{route} {100 * share:.0f} %" for route, share in calls["shares"].items()]
    codes = ", ".join(calls["reasons"])
    return ", ".join(routes) + (f" ({codes})" if codes else "")


def remarks(results: Sequence[dict]) -> list[str]:
    """What the columns mean, and in words what is behind the codes in the last one."""
    lines = ["Accuracy on the test nodes after the last epoch, in percent: mean ± "
             "standard deviation over the seeds.",
             "difference: gnnaccel minus native, in percentage points, and in "
             "standard deviations of the native seeds.",
             "paired: standard error of the mean difference at the same seed; seeds "
             "whose two accuracies are equal."]
    texts = {code: reason["text"] for result in results
             for code, reason in result["calls"]["reasons"].items()}
    lines += [f"{code}: {text}" for code, text in sorted(texts.items()) if text]
    if any("unseen" in result["calls"]["shares"] for result in results):
        lines.append(
            "unseen: calls of layers that this gnnaccel does not take over; they ran natively.")
    return lines + sorted({kernel for result in results for kernel in result["calls"]["kernels"]})


def show(console, meta: dict, results: Sequence[dict]) -> None:
    """Print the table with rich: the two sides below each other, so that it fits into a
    terminal."""
    from rich.table import Table

    table = Table("dataset", "", "accuracy", "ms/epoch", "calls", title=_title(meta),
                  show_lines=True)
    for column in table.columns[:4]:
        column.no_wrap = True
    for result in results:
        what, native, fast, difference, paired, epochs, faster, calls = cells(result)
        table.add_row(what.replace(", ", "\n"), "native\ngnnaccel\ndifference\npaired",
                      "\n".join([native, fast, difference, paired]),
                      epochs.replace(" -> ", "\n") + f"\n{faster}", calls)
    console.print(table)
    for line in remarks(results):
        console.print(line, highlight=False, markup=False)


def markdown(meta: dict, results: Sequence[dict]) -> str:
    """The same as a Markdown document."""
    rows = [HEADER, ["---"] * len(HEADER), *map(cells, results)]
    lines = [_title(meta), "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    return "\n".join(lines + [f"- {line}" for line in remarks(results)]) + "\n"


def _title(meta: dict) -> str:
    seeds = "1 seed" if meta["seeds"] == 1 else f"{meta['seeds']} seeds"
    return (f"{seeds} x {meta['epochs']} epochs on {meta['device']}, torch "
            f"{meta['torch']}, PyG {meta['pyg']}, "
            f"gnnaccel {meta['gnnaccel']} ({meta['backend'] or 'switched off'})")
