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
    "GATConv": {"kernels": (26, 41), "known": (50, 75), "new": (52, 81)},
    "GCNConv": {"kernels": (38, 73), "known": (168, 296), "new": (160, 144)},
    "SAGEConv": {"kernels": (20, 34), "known": (48, 64), "new": (80, 80)},
    "SAGEConv over a matrix": {"kernels": (29, 49), "known": (40, 64), "new": (72, 96)},
    "GINConv": {"kernels": (20, 34), "known": (48, 64), "new": (80, 80)},
    "RGCNConv": {"kernels": (57, 114), "known": (66, 92), "new": (68, 97)},
    "HGTConv": {"kernels": (143, 376), "known": (120, 158), "new": (124, 168)},
    "HeteroConv": {"kernels": (108, 211), "known": (208, 238), "new": (212, 248)},
    "a user's": {"kernels": (20, 30), "known": (48, 64), "new": (80, 80)},
    "GATv2Conv": {"kernels": (63, 113), "known": (50, 75), "new": (52, 81)},
    "TransformerConv": {"kernels": (66, 120), "known": (50, 75), "new": (52, 81)},
    "RGATConv": {"kernels": (82, 136), "known": (50, 76), "new": (52, 81)},
    "FiLMConv": {"kernels": (100, 200), "known": (66, 92), "new": (68, 97)},
    "HEATConv": {"kernels": (189, 322), "known": (66, 101), "new": (68, 105)},
    "PNAConv": {"kernels": (52, 150), "known": (58, 83), "new": (60, 89)},
    "HANConv": {"kernels": (105, 213), "known": (88, 142), "new": (92, 152)},
    "HeteroConv of GATConv": {"kernels": (104, 216), "known": (208, 238), "new": (212, 248)},
    "DGL GATConv": {"kernels": (72, 93), "known": (130, 186), "new": (176, 249)},
    "DGL HGTConv": {"kernels": (172, 355), "known": (394, 324), "new": (440, 387)},
    "DGL GraphConv": {"kernels": (55, 56), "known": (112, 80), "new": (152, 128)},
}
#: layer -> the same of eight calls by kernels over graphs that are new each time: in inference, and
#: in training with backward. "list": that sum their lists of edges as they are
FRESH: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "GATConv": ((1182, 1330), (1742, 2018)),
    "TransformerConv": ((1332, 1425), (2404, 2777)),
    "GCNConv": ((1658, 1454), (2432, 2146)),
    "SAGEConv": ((1472, 1134), (2302, 1738)),
    "GINConv": ((1472, 1134), (2246, 1674)),
    "GCNConv, list": ((416, 664), (536, 904)),
    "SAGEConv, list": ((272, 520), (392, 752)),
    "GINConv, list": ((232, 448), (352, 664)),
}
#: files at most, of gnnaccel's, whose functions run in a GATConv's first call by kernels, and in a
#: repeated one
FILES = (42, 15)


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
