"""Building index arrays by sorting, with torch operations, on any device.

Large graphs are built this way: a radix sort beats counting once the atomics no longer fit the L2
cache. Small ones on a GPU are built by counting (`cuda.structures.structure`), which launches
less. The order within a row is the same both ways.
"""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnaccel.cuda.structures import structure as cuda_structure
from gnnaccel.cuda.structures.structure import Rows
from gnnaccel.dispatch.graph.edge_arrays import CSC, destinations
from gnnaccel.errors import VALID, GraphError


def check_ids(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> None:
    """GraphError when an id is outside its range. Waits for the device: for graphs on the CPU."""
    for ids, count, end in ((src, num_src, "source"), (dst, num_dst, "destination")):
        if ids.numel():
            low, high = (int(v) for v in torch.aminmax(ids))
            if low < 0 or high >= count:
                raise GraphError(f"edge_index holds {end} ids from {low} to {high}, but "
                                 f"there are {count} {end} nodes: ids must "
                                 f"lie in [0, {count}). Check num_nodes and the node "
                                 f"features' first dimension. {VALID}")


def sorted_edges(src: Tensor, dst: Tensor, num_src: int, num_dst: int,
                 loops: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(src, dst, order, flags): edges by destination, stable; dropped ones come last, with ids
    one past the range.

    ``loops`` > 0 drops edges i -> i and adds one for each node below it. ``flags`` [2] int32 as in
    structure.cu.
    """
    dtype = torch.int32 if max(num_src, num_dst) < 2**31 - 1 else torch.int64
    invalid = (src < 0) | (src >= num_src) | (dst < 0) | (dst >= num_dst)
    drop = invalid | (src == dst) if loops else invalid
    src, dst = src.to(dtype).masked_fill(drop, num_src), dst.to(dtype).masked_fill(drop, num_dst)
    if loops:
        nodes = torch.arange(loops, dtype=dtype, device=src.device)
        src, dst = torch.cat([src, nodes]), torch.cat([dst, nodes])
    flags = torch.stack([drop.new_zeros(()), invalid.any()]).to(torch.int32)
    dst, order = torch.sort(dst, stable=True)
    return src[order], dst, order, flags


def offsets(sorted_ids: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[count + 1] where each id's run begins in ``sorted_ids``."""
    bounds = torch.arange(count + 1, dtype=sorted_ids.dtype, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, bounds, out_int32=dtype == torch.int32)


def csc(src: Tensor, dst: Tensor, num_src: int, num_dst: int, loops: int, wide: bool,
        places: bool) -> Rows:
    """`cuda.structures.structure.csc` by sorting. ``places`` False leaves `Rows.place` empty:
    nothing but edge features and dropout reads it, and it is half of the memory."""
    dtype = torch.int64 if wide else torch.int32
    src, dst, order, flags = sorted_edges(src, dst, num_src, num_dst, loops)
    indptr = offsets(dst, num_dst, dtype)
    place = order.to(dtype) if places else order.new_empty(0, dtype=dtype)
    return Rows(indptr, src.to(torch.int32), place,
                cuda_structure.split_rows(indptr, src.shape[0], flags))


def csc_as_given(given: CSC, num_src: int, wide: bool, places: bool) -> Rows:
    """`csc` of edges that the host has sorted already. Arrays of the kernels' dtypes are taken as
    they are, others are converted.

    Ids out of range are reported, but cannot be left out: the host's own kernels would read them
    too.
    """
    dtype = torch.int64 if wide else torch.int32
    edges, ids = given.src.shape[0], given.ids
    if not places:
        place = ids if ids.dtype == dtype else ids.new_empty(0, dtype=dtype)
    else:
        place = (ids.to(dtype)
                 if ids.shape[0] else torch.arange(edges, dtype=dtype, device=ids.device))
    invalid = ((given.src < 0) | (given.src >= num_src)).any()
    flags = torch.stack([invalid.new_zeros(()), invalid]).to(torch.int32)
    indptr = given.indptr.to(dtype)
    return Rows(indptr, given.src.to(torch.int32), place,
                cuda_structure.split_rows(indptr, edges, flags))


def with_places(rows: Rows) -> Rows:
    """``rows`` in the order of edge ids, with `Rows.place`."""
    place = torch.arange(rows.other.shape[0], dtype=rows.indptr.dtype, device=rows.other.device)
    return replace(rows, place=place, launched=None, made={})


def edges_as_given(given: CSC, num_src: int, ids: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(src, dst, edge ids) [E] int64 in the order of the CSC: int64 arrays are taken as they are.
    ``ids`` False: ids that would have to be made are None. GraphError for ids out of range."""
    check_ids(given.src, given.src[:0], num_src, 0)
    eid = given.ids.long() if given.ids.shape[0] else None
    if ids and eid is None:
        eid = torch.arange(given.src.shape[0], device=given.src.device)
    return given.src.long(), destinations(given).long(), eid


def transpose(by_dst: Rows, num_src: int, places: bool, inverse: bool = False) -> Rows:
    """`cuda.structures.structure.transpose` by sorting; ``by_dst`` must come from `csc` here,
    whose dropped edges sort to the end. ``places`` as for `csc`; ``inverse`` makes
    `Rows.inverse`."""
    dtype = by_dst.indptr.dtype
    src, order = torch.sort(by_dst.other, stable=True)
    indptr = offsets(src, num_src, dtype)
    degree = by_dst.indptr.diff()
    total = by_dst.other.shape[0]
    # dropped edges belong to one more row, never read
    rest = (total - by_dst.indptr[-1:]).to(degree.dtype)
    dst = torch.repeat_interleave(torch.cat([degree, rest]), output_size=total)
    nbr = dst[order].to(torch.int32)
    del dst, src
    place = order.to(dtype) if places else order.new_empty(0, dtype=dtype)
    back = None
    if inverse:
        back = order.new_empty(total, dtype=dtype).scatter_(0, order,
                                                            torch.arange(total, dtype=dtype,
                                                                         device=order.device))
    return Rows(indptr, nbr, place, cuda_structure.split_rows(indptr, total), inverse=back)
