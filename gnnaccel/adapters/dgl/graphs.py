"""DGL's graphs as the edges that dispatch works on.

Edges are given as one ``edge_index`` for each relation of a graph, column i being the edge with id
i: the order of ``g.edges()``, and that of DGL's edge features. It is kept in ``g._graph._cache``,
where DGL itself keeps what it derives from a structure. So it goes with the last graph object over
that structure; local scopes share it (clones have their own); and a change of the graph, which
gives it another ``_graph``, is seen.

The arrays are DGL's own, not copied (`EdgeArrays`): its COO, its CSC too if it has made one, or the
CSC alone. DGL is never made to create a format. Of a bridged graph they are one tensor [2, E],
copied to the device once.
"""
from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gnnaccel.adapters.dgl.bridge.tags import device_of, on_host
from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays, by_id, csc_of
from gnnaccel.dispatch.policy.reasons import Reason, reason

_KEY = "gnnaccel"
# not subclasses, which may pass messages in their own way
_GRAPHS = ("dgl.heterograph.DGLGraph", "dgl.heterograph.DGLBlock")


class Edges:
    """One relation of a graph. ``edge_index``: as in `GraphView`, by edge id, in the graph's own id
    dtype, on its device."""

    __slots__ = ("edge_index", "num_src", "num_dst", "_bare", "_elsewhere", "_degrees",
                 "_kinds", "__weakref__")

    def __init__(self, edge_index: Tensor | EdgeArrays, num_src: int, num_dst: int):
        self.edge_index, self.num_src, self.num_dst = edge_index, num_src, num_dst
        self._bare: bool | None = None
        self._kinds: int | None = None
        self._degrees: dict[tuple, Tensor] = {}
        self._elsewhere: dict[torch.device, Edges] = {}

    def on(self, device: torch.device) -> Edges:
        """These edges on ``device``, copied there the first time."""
        if self.edge_index.device == device:
            return self
        return (self._elsewhere.get(device)
                or self._elsewhere.setdefault(device, self._copied(device)))

    @torch.inference_mode(False)  # made in inference mode it could not take part in training later
    def _copied(self, device: torch.device) -> Edges:
        return Edges(self.edge_index.to(device), self.num_src, self.num_dst)

    def has_bare(self) -> bool:
        """Whether some destination has no edge. Waits for the device, the first time."""
        if self._bare is None:
            csc = csc_of(self.edge_index)
            if csc is not None:
                self._bare = not bool((csc.indptr.diff() > 0).all())
            else:
                covered = torch.zeros(self.num_dst, dtype=torch.bool, device=self.edge_index.device)
                covered[self.edge_index[1].long()] = True
                self._bare = not bool(covered.all())
        return self._bare

    def kinds_of_degree(self) -> int:
        """How many different degrees above 0 destinations have: the mailboxes that DGL makes. Waits
        for the device, the first time."""
        if self._kinds is None:
            counts = self.degrees(1, torch.int64).bincount()
            self._kinds = int(counts[1:].count_nonzero())
        return self._kinds

    def entered(self) -> Tensor:
        """The destinations that have edges, in order. Waits for the device."""
        return self.degrees(1, torch.int64).nonzero().squeeze(1)

    @torch.inference_mode(False)
    def degrees(self, end: int, dtype: torch.dtype) -> Tensor:
        """[nodes] of ``dtype``: how many edges leave each source (``end`` 0) or enter each
        destination (1)."""
        degrees = self._degrees.get((end, dtype))
        if degrees is None:
            csc = csc_of(self.edge_index) if end else None
            counts = self._counted(end) if csc is None else csc.indptr.diff()
            degrees = self._degrees[end, dtype] = counts.to(dtype)
        return degrees

    def _counted(self, end: int) -> Tensor:
        ids = self.edge_index[end].long()
        return ids.new_zeros(self.num_dst
                             if end else self.num_src).scatter_add_(0, ids, torch.ones_like(ids))

    @torch.inference_mode(False)
    def scale(self, end: int, power: float, plus: int, dtype: torch.dtype) -> Tensor:
        """[nodes] of ``dtype``: (degree + ``plus``) ** ``power``, of degrees of at least 1."""
        key = end, power, plus, dtype
        scale = self._degrees.get(key)
        if scale is None:
            degree = self.degrees(end, dtype)
            degree = degree + plus if plus else degree.clamp(min=1)
            scale = self._degrees[key] = 1.0 / degree if power == -1 else degree.pow(power)
        return scale


class _Kept:
    """Kept values of an index object, by number of the relation: its `Edges`, each in a list that
    is empty until they are asked for; and the index objects of single relations, which share those
    lists."""

    __slots__ = ("edges", "indices", "signs", "without_ids")

    def __init__(self) -> None:
        #: result of `without_ids`
        self.without_ids: bool | None = None
        self.edges: dict[int, list[Edges]] = {}
        self.indices: dict[int, Any] = {}
        #: result of `signs`; empty until it is asked for
        self.signs: tuple[Tensor, ...] | None = ()


def _kept(index: Any) -> _Kept:
    store = index._cache.get(_KEY)
    return store if store is not None else index._cache.setdefault(_KEY, _Kept())


def homogeneous(g: Any) -> Edges | Reason:
    """The edges of a graph with one type of edges from one type of nodes to one: homogeneous, a
    relation of a heterograph, or a block."""
    why = form_reason(g)
    if why is not None:
        return why
    if len(g.canonical_etypes) != 1 or len(g.srctypes) != 1 or len(g.dsttypes) != 1:
        return reason("GA204",
                      f"the graph has {len(g.srctypes)} and {len(g.dsttypes)} types of "
                      f"nodes, {len(g.canonical_etypes)} of "
                               "edges")
    return of_index(g._graph, 0)


def relation(g: Any, etype: Any) -> Edges | Reason:
    """The edges of one relation of a heterograph. ``etype``: as `DGLGraph.get_etype_id` takes
    it."""
    return form_reason(g) or of_index(g._graph, g.get_etype_id(etype))


def typed(g: Any, etypes: Any, device: torch.device) -> tuple[Edges, Tensor] | Reason:
    """The edges of a homogeneous graph and the [E] types that the caller gives them, by edge id."""
    edges = homogeneous(g)
    if type(edges) is Reason:
        return edges
    why = place_reason(edges, device)
    if why is not None:
        return why
    count = edges.edge_index.shape[1]
    if type(etypes) is not Tensor or etypes.layout != torch.strided:
        return reason("GA204", f"the edge types are a {type(etypes).__name__}",
                      "pass them as a tensor of shape [E]")
    if etypes.dim() != 1 or etypes.shape[0] != count or etypes.device != device:
        return reason("GA206",
                      f"edge types are of shape {list(etypes.shape)} on {etypes.device} "
                      f"for {count} edges on {device}")
    if etypes.dtype not in (torch.int64, torch.int32):
        return reason("GA204", f"edge types are {etypes.dtype}", "use int64 or int32 types")
    return edges, etypes


def place_reason(edges: Edges, device: torch.device) -> Reason | None:
    """Why features on ``device`` cannot travel over these edges."""
    if edges.edge_index.device != device:
        return reason("GA204",
                      f"the graph is on {edges.edge_index.device}, the features on {device}")
    if not edges.edge_index.shape[1]:
        return reason("GA303")
    return None


def size_reason(edges: Edges, num_src: int, num_dst: int) -> Reason | None:
    """Why features of so many nodes do not belong to this graph; the host's own code then
    raises."""
    if (num_src, num_dst) != (edges.num_src, edges.num_dst):
        return reason("GA206",
                      f"features of {num_src} and {num_dst} nodes for a graph of "
                      f"{edges.num_src} and {edges.num_dst}")
    return None


def zero_in_degree_reason(layer: Any, edges: Edges) -> Reason | None:
    """Why the layer refuses the graph: it has nodes that no edge enters, for which the host's own
    code raises the error."""
    if not layer._allow_zero_in_degree and edges.has_bare():
        return reason("GA204", "there are nodes of in-degree 0, which the layer does not allow",
                      "allow_zero_in_degree=True")
    return None


def form_reason(g: Any) -> Reason | None:
    """Why ``g`` is no graph whose edges can be read."""
    cls = type(g)
    if f"{cls.__module__}.{cls.__qualname__}" not in _GRAPHS:
        return reason("GA204", f"the graph is a {cls.__name__}", "pass a DGLGraph")
    return None


# --- index objects --------------------------------------------------------------------------------

def of_index(index: Any, etype: int) -> Edges:
    """The edges of one relation of a ``HeteroGraphIndex``, which keeps them."""
    box = _box(index, etype)
    if not box:
        box.append(_read(index, etype))
    return box[0]


def signs(g: Any) -> tuple[Tensor, ...] | None:
    """A tensor that stands for this graph as it is, for `native_memory.GRAPHS`.

    It has as many numbers as the graph has edges and takes no memory. It goes with the structure:
    a changed graph has another. None of graphs that are not on the CPU.
    """
    index = g._graph
    store = _kept(index)
    if store.signs == ():
        on_cpu = device_of(index) is None and g.device.type == "cpu"
        store.signs = (_one().expand(int(num_edges(g))),) if on_cpu else None
    return store.signs


def without_ids(g: Any) -> bool:
    """Whether DGL holds a graph with one relation as a CSC or CSR that leaves the ids of edges out,
    as SciPy's matrices do. On a CPU its sums over such edges in fp32, or their gradients, raise an
    error."""
    store = _kept(g._graph)
    if store.without_ids is None:
        index = g._graph
        created = index.formats()["created"]
        store.without_ids = any(not len(index.adjacency_matrix_tensors(0, turned, "csr")[4])
                                for name, turned in (("csc", True), ("csr", False))
                                if name in created)
    return store.without_ids


def structure(g: Any) -> list[Any]:
    """The edges of a graph with one relation, as they were read; none if they were not."""
    store = g._graph._cache.get(_KEY)
    box = None if store is None else store.edges.get(0)
    return [box[0].edge_index] if box else []


def parts(g: Any) -> list[Any]:
    """The objects that operands hold of a graph with one relation."""
    store = g._graph._cache.get(_KEY)
    box = None if store is None else store.edges.get(0)
    return [box[0], box[0].edge_index] if box else []


def names(g: Any) -> tuple:
    """Names of the types of nodes, at either end, and of edges."""
    return (*g.srctypes, None, *g.dsttypes, None, *g.canonical_etypes)


def num_edges(g: Any) -> float:
    """Edges of all types; more than any limit of a bridged graph, over which no host code runs."""
    index = g._graph
    if device_of(index) is not None:
        return math.inf
    return sum(map(index.number_of_edges, range(len(g.canonical_etypes))))


@functools.cache
@torch.inference_mode(False)  # what is made in inference mode has no version
def _one() -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def kept_edges(index: Any) -> list[Edges]:
    """The edges of relations that have been asked for."""
    return [edges for box in _kept(index).edges.values() for edges in box]


def remembering(native: Any) -> Any:
    """``HeteroGraphIndex.get_relation_graph`` that gives the same object each time. DGL makes a new
    one, over the same C++ object, for every ``g[etype]``, on which nothing could be kept."""

    @functools.wraps(native)
    def get_relation_graph(self: Any, etype: Any) -> Any:
        indices, number = _kept(self).indices, int(etype)
        single = indices.get(number)
        if single is None:
            single = native(self, etype)
            _kept(single).edges[0] = _box(self, number)
            single = indices.setdefault(number, single)
        return single

    return get_relation_graph


def _box(index: Any, etype: int) -> list[Edges]:
    return _kept(index).edges.setdefault(etype, [])


@torch.inference_mode(False)  # made in inference mode they could not take part in training later
def _read(index: Any, etype: int) -> Edges:
    device = device_of(index)
    if device is None:
        return _read_host(index, etype)
    # a bridged graph is read on the host, and copied as a whole
    edges = _read_host(index.copy_to(on_host()), etype)
    return Edges(edges.edge_index.to(device), edges.num_src, edges.num_dst)


def _read_host(index: Any, etype: int) -> Edges:
    src_type, dst_type = index.metagraph.find_edge(etype)
    # asked of the relation itself: several relations answer with the formats of the first
    alone = index if index.number_of_etypes() == 1 else index.get_relation_graph(etype)
    created = alone.formats()["created"]
    csc = CSC(*index.adjacency_matrix_tensors(etype, True, "csr")[2:]) if "csc" in created else None
    ends = None
    if "coo" in created:
        ends = index.edges(etype, "eid")[:2]
    elif csc is None:
        # in any order: DGL would make and keep the COO for it, or refuse where it must not
        ends = by_id(*index.edges(etype))
    return Edges(EdgeArrays(ends, csc), index.num_nodes(src_type), index.num_nodes(dst_type))
