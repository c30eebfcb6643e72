"""How many Python calls gnnaccel makes in one call of a layer.

Times are noise on a shared machine; these counts are the same everywhere. `MOST` holds the upper
bounds. Lower one when a change makes a layer cheaper; raise one only with a reason that the commit
tells.
"""
from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import gnnaccel

_OURS = os.path.dirname(gnnaccel.__file__) + os.sep
_INLINED_SINCE_312 = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Counts(NamedTuple):
    """``python``: calls of gnnaccel's Python functions; ``builtin``: calls of built-in functions
    from them; ``files``: those whose functions ran."""

    python: int
    builtin: int
    files: frozenset[str]


def counted(call: Callable[[], object]) -> Counts:
    """What ``call()`` comes to."""
    seen, files = [0, 0], set()

    def profile(frame, event, arg) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return
        if event == "call" and code.co_name not in _INLINED_SINCE_312:
            seen[0] += 1
            files.add(code.co_filename[len(_OURS):])
        elif event == "c_call":
            seen[1] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what it finds runs functions that forget
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Counts(*seen, frozenset(files))


#: layer -> (Python, built-in) calls at most. "kernels": of a repeated call by kernels; "known": of
#: eight native calls over a graph that came before; "new": of eight over graphs new each time
MOST: dict[str, dict[str, tuple[int, int]]] = {
    "GATConv": {"kernels": (22, 41), "known": (50, 75), "new": (52, 80)},
    "GCNConv": {"kernels": (31, 73), "known": (144, 296), "new": (160, 136)},
    "SAGEConv": {"kernels": (16, 34), "known": (48, 64), "new": (80, 72)},
    "SAGEConv over a matrix": {"kernels": (25, 49), "known": (40, 64), "new": (72, 72)},
    "GINConv": {"kernels": (16, 34), "known": (48, 64), "new": (80, 72)},
    "RGCNConv": {"kernels": (47, 109), "known": (66, 92), "new": (68, 96)},
    "HGTConv": {"kernels": (120, 373), "known": (120, 158), "new": (124, 167)},
    "HeteroConv": {"kernels": (81, 206), "known": (208, 238), "new": (212, 247)},
    "a user's": {"kernels": (16, 30), "known": (48, 64), "new": (80, 72)},
    "GATv2Conv": {"kernels": (51, 112), "known": (50, 75), "new": (52, 80)},
    "TransformerConv": {"kernels": (54, 119), "known": (50, 75), "new": (52, 80)},
    "RGATConv": {"kernels": (62, 131), "known": (50, 76), "new": (52, 80)},
    "FiLMConv": {"kernels": (88, 189), "known": (130, 92), "new": (132, 96)},
    "HEATConv": {"kernels": (163, 308), "known": (66, 101), "new": (68, 104)},
    "PNAConv": {"kernels": (49, 163), "known": (58, 83), "new": (60, 88)},
    "FiLMConv of one relation": {"kernels": (94, 81), "known": (120, 104), "new": (112, 72)},
    "PNAConv with edges": {"kernels": (50, 210), "known": (58, 83), "new": (60, 88)},
    "HANConv": {"kernels": (96, 213), "known": (88, 142), "new": (92, 151)},
    "HeteroConv of GATConv": {"kernels": (82, 216), "known": (208, 238), "new": (212, 247)},
    "ARMAConv": {"kernels": (74, 161), "known": (192, 360), "new": (232, 200)},
    "DGL GATConv": {"kernels": (59, 93), "known": (138, 186), "new": (184, 249)},
    "DGL HGTConv": {"kernels": (135, 345), "known": (402, 324), "new": (448, 387)},
    "DGL GraphConv": {"kernels": (52, 56), "known": (120, 80), "new": (160, 128)},
}
#: layer -> the same of eight calls by kernels over graphs that are new each time: in inference, and
#: in training with backward. "list": that sum their lists of edges as they are
FRESH: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "GATConv": ((1135, 1348), (1679, 2060)),
    "TransformerConv": ((1245, 1443), (2229, 2819)),
    "GCNConv": ((1586, 1446), (2352, 2170)),
    "SAGEConv": ((1408, 1134), (2174, 1762)),
    "GINConv": ((1408, 1134), (2126, 1698)),
    "FiLMConv of one relation": ((2567, 2549), (3477, 3353)),
    "GCNConv, list": ((384, 656), (504, 920)),
    "SAGEConv, list": ((248, 520), (368, 776)),
    "GINConv, list": ((208, 448), (328, 688)),
}
#: files at most, of gnnaccel's, whose functions run in a GATConv's first call by kernels, and in a
#: repeated one
FILES = (35, 13)


def by_kernels(name: str, layer: Any, args: tuple, route: Any) -> None:
    """A repeated call of ``layer`` by kernels costs no more than `MOST` says."""
    with torch.no_grad(), route.on():
        for _ in range(6):
            layer(*args)
        found = counted(lambda: layer(*args))
    assert _routes() == {"cuda"}
    _judge(found, name, "kernels")


def over_new_graphs(name: str, layer: Any, inputs: Callable[[], tuple], train: bool) -> None:
    """Eight calls of ``layer`` by kernels, each over another graph, cost no more than `FRESH` says.

    ``inputs()``: arguments over a new graph. The caller sees to it that kernels run.
    """
    def run(times: int) -> None:
        for _ in range(times):
            x, *more = inputs()
            out = layer(x.requires_grad_(train), *more)
            if train:
                out.sum().backward()

    with torch.set_grad_enabled(train):
        run(16)
        found = counted(lambda: run(8))
    assert _routes() == {"cuda"}
    _hold(found, FRESH[name][train], f"{name}, {'training' if train else 'inference'}")


def natively(name: str, layer: Any, inputs: Callable[[], tuple], graph: str) -> None:
    """The same of native calls; eight of them, since most of a streak are cheaper than the rest.

    ``inputs()``: arguments over a new graph, on a CPU.
    """
    args = inputs()  # all are kept alive, so that each is another
    calls = [inputs() if graph == "new" else args for _ in range(24)]
    with torch.no_grad(), gnnaccel.enabled(backend="cuda"):
        for args in calls[:-8]:
            layer(*args)
        found = counted(lambda: [layer(*args) for args in calls[-8:]])
    assert _routes() == {"native"}
    _judge(found, name, graph)


def _judge(found: Counts, layer: str, what: str) -> None:
    _hold(found, MOST[layer][what], f"{layer}, {what}")


def _hold(found: Counts, most: tuple[int, int], what: str) -> None:
    seen = f"{what}: {found[:2]} calls, at most {most}"
    assert found.python <= most[0] and found.builtin <= most[1], seen


def _routes() -> set[str]:
    return {route for one in gnnaccel.stats().values() for route in one["routes"]}
