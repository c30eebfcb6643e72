"""The structure of a relational call, for adapters of any host."""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gnnaccel.dispatch.relational.view import Ends, RelationView, by_type


def viewer(structure: tuple[Tensor, ...], num_src: int, num_dst: int, num_relations: int,
           assemble: Callable[..., Ends] = by_type,
           ignore: bool = False) -> Callable[[bool, bool], RelationView]:
    """The function that makes the `RelationView` of these edges; arguments as there."""
    def make(own: bool, compact: bool) -> RelationView:
        return RelationView(structure, num_src, num_dst, num_relations, assemble, compact, own,
                            ignore)

    return make
