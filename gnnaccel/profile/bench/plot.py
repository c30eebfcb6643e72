"""A picture of a result: how many times faster than the host, by shape and layer. Needs matplotlib,
and nothing else."""
from __future__ import annotations

from typing import Any

from gnnaccel.profile.bench import metrics
from gnnaccel.profile.bench.result import Result

COLOURS = ("#2f6db3", "#d9812f", "#3f9c6a", "#8d5fb0", "#b0475a", "#5c6670", "#9a8f2e")
DIAMOND: dict[str, Any] = dict(marker="D", markersize=5, markerfacecolor="white",
                               markeredgecolor="black", linestyle="none")
TITLES = {"forward": "Forward", "training": "Forward + backward"}


def draw(result: Result, path: str) -> None:
    """Write a PNG with one panel per mode. Bars: gnnaccel; diamonds: torch.compile; both against
    the host (of DGL on a GPU, what its own CUDA build took)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = _drawn(metrics.cells(result))
    modes = [mode for mode in TITLES if any(cell.mode == mode for cell in cells)] or ["forward"]
    shapes, layers = (list(dict.fromkeys(getattr(cell, name) for cell in cells))
                      for name in ("shape", "layer"))
    by_place = {(cell.shape, cell.layer, cell.mode): cell for cell in reversed(cells)}
    figure, axes = pyplot.subplots(len(modes), 1, figsize=(max(7.0, 2.4 * len(shapes) + 2),
                                                           3.6 * len(modes)),
                                   squeeze=False, sharex=True, facecolor="white",
                                   layout="constrained")
    for axis, mode in zip(axes[:, 0], modes):
        for index, layer in enumerate(layers):
            _series(axis, [by_place.get((shape, layer, mode)) for shape in shapes], index,
                    len(layers))
        _dress(axis, shapes, TITLES[mode])
    handles = _handles(layers, any(cell.ms("compiled") for cell in cells))
    per_row = max(2, int(figure.get_figwidth() // 2.2))  # the longest label takes some two inches
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), per_row),
                  frameon=False, fontsize=9)
    figure.suptitle(f"Speed-up over {_rival(cells)}, {result.provenance.get('gpu') or 'CPU'}",
                    fontsize=12)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _drawn(cells: list[metrics.Cell]) -> list[metrics.Cell]:
    """The layers, of the first kind of which there are any."""
    for kind in ("layer", "relation", "dgl", "aggregate", "layer-cpu", "relation-cpu", "dgl-cpu",
                 "aggregate-cpu", "quantized"):
        if found := [cell for cell in cells if cell.kind == kind]:
            return found
    return []


def _rival(cells: list[metrics.Cell]) -> str:
    rivals = {"dgl": "DGL's own CUDA build", "dgl-cpu": "DGL",
              "quantized": "our own fp32, of rows in int8"}
    return rivals.get(cells[0].kind if cells else "", "PyG")


def _speedup(cell: metrics.Cell) -> float | None:
    return cell.metric({"dgl": "vs_dgl_cuda", "quantized": "int8_gain"}.get(cell.kind, "vs_native"))


def _series(axis, cells: list[metrics.Cell | None], index: int, count: int) -> None:
    width = 0.8 / count
    for group, cell in enumerate(cells):
        if cell is None:
            continue
        x = group + (index - (count - 1) / 2) * width
        speedup, compiled = _speedup(cell), metrics.ratio(cell.ms("native"), cell.ms("compiled"))
        if speedup:
            # On a log axis a bar that starts at 1 shows gain and loss alike.
            axis.bar(x, speedup - 1, width * 0.92, bottom=1, color=COLOURS[index % len(COLOURS)])
            axis.annotate(f"{speedup:.3g}x", (x, max(speedup, 1)), (0, 2),
                          textcoords="offset points", ha="center", fontsize=8)
        else:
            axis.annotate(_absence(cell), (x, 1), (0, 3), textcoords="offset points", ha="center",
                          rotation=90, fontsize=7, color="#5c6670")
        if compiled:
            axis.plot(x, compiled, **DIAMOND)


def _absence(cell: metrics.Cell) -> str:
    """Why there is no bar, with gnnaccel's time when it has one."""
    ours, native = cell.by.get("gnnaccel"), cell.by.get("native")
    if cell.kind == "dgl" and ours and ours.timing:
        return f"no figure of DGL's; gnnaccel {ours.ms:.3g} ms"
    if cell.kind != "dgl" and (native is None or native.error):
        what = f"{_rival([cell])}: {((native.error if native else None) or 'not run')[:24]}"
        return f"{what}; gnnaccel {ours.ms:.3g} ms" if ours and ours.timing else what
    return f"gnnaccel: {((ours.error if ours else None) or 'not run')[:24]}"


def _dress(axis, shapes: list[str], title: str) -> None:
    axis.set_yscale("log")
    axis.set_ylim(top=max(10.0, axis.get_ylim()[1] * 1.6))
    axis.set_xticks(range(len(shapes)), shapes)
    axis.set_ylabel("times faster")
    axis.set_title(title, loc="left", fontsize=10)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.grid(axis="y", color="#e3e6e8", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _handles(layers: list[str], compiled: bool) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [Patch(color=COLOURS[index % len(COLOURS)], label=layer)
            for index, layer in enumerate(layers)]
    diamond = Line2D([], [], label="the same under torch.compile, without gnnaccel", **DIAMOND)
    return [*bars, diamond] if compiled else bars
