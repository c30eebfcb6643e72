"""Attention over one graph that is put together from several of the caller's tensors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnnaccel.dispatch.graph import cache
from gnnaccel.dispatch.graph.joined_view import JoinedView
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.plan.request import CallSpec, Request


@dataclass(frozen=True)
class JoinedSpec(CallSpec):
    """`CallSpec` of a call whose graph is a `JoinedView` by ``join``, which is hashable. Its
    tensors are a `RelationalInputs`.

    Layers ``around`` others are the ones whose graphs are put `together`.
    """

    join: Any = None

    @property
    def together(self) -> bool:
        return self.around

    def request(self, device: str, grad: bool, fresh: int) -> Request:
        return super().request(device, grad,
                               fresh)._replace(part_bits=len(self.join.parts).bit_length())

    def resized(self, num_src: int, num_dst: int, num_edges: int, join: Any,
                loops: int = 0) -> JoinedSpec:
        """The statement of a call that differs in its graph alone."""
        return JoinedSpec(self.program, self.native, self.heads, self.width, self.row, self.out,
                          num_src, num_dst, num_edges, loops, self.exposed, self.folded,
                          self.around, self.flipped, join)

    def _sizes(self) -> tuple:
        return "joined", self.num_src, self.num_dst, self.loops, self.join

    def peek(self, given: Any) -> bool:
        return cache.peek_many(given.structure, self._sizes())

    def lookup(self, given: Any) -> tuple[GraphView, str]:
        return cache.lookup_many(given.structure, self._sizes(),
                                 lambda own: JoinedView(given.structure, self.num_src, self.num_dst,
                                                        self.join, own, self.loops))
