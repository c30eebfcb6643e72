"""What the planner is asked (`Request`) and what an adapter found out about a call (`Stated`)."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.dispatch.program import Program


class Request(NamedTuple):
    """Everything a plan depends on; the memo key. Sizes are classes of magnitude (bits), so that mini-batches whose sizes
    differ a little share a plan."""

    program: Program
    native: str  # the host layer's class, for its cost
    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    device: str
    src_bits: int
    dst_bits: int
    edge_bits: int
    grad: bool
    fresh: bool  # the graph's structure is not cached yet

    @property
    def num_src(self) -> int:
        return 1 << self.src_bits

    @property
    def num_dst(self) -> int:
        return 1 << self.dst_bits

    @property
    def num_edges(self) -> int:
        return 1 << self.edge_bits


@dataclass
class Stated:
    """A host call that the adapter understood: its Program, the graph it runs over, and what `run` will need.

    ``edge_index`` [2, E] plain tensor; ``loops``: nodes that get a self loop; ``exposed`` as in `attention.Call`; ``host``:
    the adapter's own notes from stating to running.
    """

    program: Program
    native: str
    heads: int
    width: int
    row: torch.dtype
    out: torch.dtype
    edge_index: Tensor
    num_src: int
    num_dst: int
    loops: int
    exposed: bool
    host: dict[str, Any] = field(default_factory=dict)

    def request(self, grad: bool, fresh: bool) -> Request:
        edges = self.edge_index.shape[1] + self.loops
        return Request(self.program, self.native, self.heads, self.width, self.row, self.out, self.edge_index.device.type,
                       self.num_src.bit_length(), self.num_dst.bit_length(), edges.bit_length(), grad, fresh)
