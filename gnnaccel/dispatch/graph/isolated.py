"""Nodes of a graph that no edge has at either end."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.view import GraphView


class Isolated:
    """``nodes``: [num_src] whether a node has no edge, and [1] one that has some. ``flag``: whether
    any has none, in pinned memory once the device has come to the event ``written``."""

    __slots__ = ("nodes", "flag", "written")

    def __init__(self, nodes: tuple[Tensor, Tensor]):
        self.nodes: tuple[Tensor, Tensor] | None = nodes
        found = nodes[0].any()
        self.written: Any = None
        self.flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=found.is_cuda)
        self.flag.copy_(found, non_blocking=True)
        if found.is_cuda:
            self.written = torch.cuda.Event()
            self.written.record(torch.cuda.current_stream(found.device))

    def known(self) -> tuple[Tensor, Tensor] | None:
        """``nodes``; None once it is known that all have edges."""
        if self.nodes is not None and (self.written is None or self.written.query()):
            if not self.flag.item():
                self.nodes = None
        return self.nodes


def isolated(view: GraphView, repeated: bool = False) -> tuple[Tensor, Tensor] | None:
    """[num_src]: whether a node of a graph with as many sources as destinations has no edge, and
    [1] one that has some; None where all are known to have some. ``repeated``: as of `Rows.bare`.
    """
    rows, entering = view.csr(places=False), view.csc(places=False)
    key = "isolated", capture.stream(view.device)  # another stream would have to wait
    anew = repeated or capture.capturing()
    if key in rows.made and not anew:
        return rows.made[key].known()
    leaving, other = rows.bare(repeated), entering.bare(repeated)
    if leaving is None or other is None:
        return None
    nodes = leaving[0] & other[0], leaving[1]
    if anew or not (rows.split.known and entering.split.known):
        return nodes
    with torch.inference_mode(False):
        return rows.keep(key, Isolated(nodes)).known()
