"""Attention over one graph that is put together from several of the caller's tensors."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gnnaccel.dispatch.graph import cache, joining
from gnnaccel.dispatch.graph.view import GraphView
from gnnaccel.dispatch.plan.request import CallSpec, Request

if TYPE_CHECKING:
    from gnnaccel.dispatch.graph.edge_arrays import EdgeArrays


class JoinedView(GraphView):
    """A `GraphView` whose edges are ``join(*structure)``: (src, dst, ...), each [E] integer, in the
    order of edge ids.

    ``join`` may have a ``checked(*structure)``: the same, but raises for ids that it would put
    where they do not belong.
    """

    def __init__(self, structure: tuple[Tensor, ...], num_src: int, num_dst: int,
                 join: Callable[..., tuple], own: bool = False, loops: int = 0):
        super().__init__(structure[0], num_src, num_dst, loops,
                         num_edges=sum(t.shape[1] for t in structure))
        self._join = join
        self._kept = structure if own else None
        self.bind(*structure)

    def bind(self, *structure: Tensor | EdgeArrays) -> None:
        """The tensors to build from, equal in value to those of the constructor."""
        self._sources = tuple(weakref.ref(t) for t in structure)

    def _given_csc(self) -> None:
        """None: what the first part comes with is not the whole."""

    def _ends(self) -> tuple[Tensor, Tensor]:
        structure: tuple[Any, ...] = tuple(found() for found in self._sources)
        if any(t is None for t in structure):
            raise RuntimeError(
                "the edges of this JoinedView are gone; call bind() with live ones first")
        structure = tuple(t.detach() for t in structure)
        src, dst = joining.checked(self._join, structure)[:2]
        return src.contiguous(), dst.contiguous()


@dataclass(frozen=True)
class JoinedSpec(CallSpec):
    """`CallSpec` of a call whose graph is a `JoinedView`; ``join``, hashable, as there. Its tensors
    are a `RelationalInputs`.

    Layers ``around`` others are the ones whose graphs are put `together`.
    """

    join: Any = None

    @property
    def together(self) -> bool:
        return self.around

    def request(self, device: str, grad: bool, fresh: int) -> Request:
        return super().request(device, grad,
                               fresh)._replace(part_bits=len(self.join.parts).bit_length())

    def _sizes(self) -> tuple:
        return "joined", self.num_src, self.num_dst, self.loops, self.join

    def peek(self, given: Any) -> bool:
        return cache.peek_many(given.structure, self._sizes())

    def lookup(self, given: Any) -> tuple[GraphView, str]:
        return cache.lookup_many(given.structure, self._sizes(),
                                 lambda own: JoinedView(given.structure, self.num_src, self.num_dst,
                                                        self.join, own, self.loops))
