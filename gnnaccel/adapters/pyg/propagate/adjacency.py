"""Adjacencies that are sparse matrices, of torch's layouts CSR and CSC, in the place of an
``edge_index``: as PyG's ``ToSparseTensor`` makes them where torch-sparse is not installed.

Such a matrix is transposed: its rows are destinations, its columns sources. So a matrix in CSR is
the structure that kernels read, and is read where it lies. PyG treats it in one of two ways. Layers
with a ``message_and_aggregate`` multiply it with the features (``torch_geometric.utils.spmm``);
others make messages, for which its values are the ``edge_weight`` that they were not given.

The index arrays of a matrix are new tensors at each access, over the same memory. They and the
values count writes together with the matrix. Not counted are writes through the tensors that the
matrix was made of, as those through ``.data`` are not.
"""
from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.adapters.own import Path, path_of
from gnnaccel.adapters.pyg.propagate import reductions
from gnnaccel.adapters.tracing.rows.standins import Arguments, Form
from gnnaccel.cuda.runtime import capture
from gnnaccel.dispatch.graph.edge_arrays import CSC, EdgeArrays, destinations
from gnnaccel.dispatch.graph.tensor_ref import TensorMap
from gnnaccel.dispatch.policy.reasons import Reason, reason

if TYPE_CHECKING:
    from gnnaccel.adapters.pyg.propagate.reading import Known

_LAYOUTS = (torch.sparse_csr, torch.sparse_csc)
_REDUCES = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}
_FUSED = ("message_and_aggregate",)
#: layers whose ``message_and_aggregate`` is ``spmm(adjacency, x, reduce=self.aggr)``, of a pair
#: ``x[0]``
_MULTIPLYING = ("APPNP", "ARMAConv", "ClusterGCNConv", "GCN2Conv", "GCNConv", "GINConv",
                "GatedGraphConv", "GraphConv", "LGConv", "LabelPropagation", "MFConv",
                "MixHopConv", "PDNConv", "SAGEConv", "SGConv", "SSGConv", "SignedConv",
                "SimpleConv", "TAGConv", "WLConvContinuous")


class Matrix(NamedTuple):
    """An adjacency, understood. ``form``: of its messages; ``arguments``: of ``propagate``, as
    messages see them; ``path``: what the host's product runs, None where it makes messages."""

    edges: EdgeArrays
    form: Form
    arguments: dict[str, Any]
    path: Path | None

    def kept(self) -> KeptMatrix:
        return KeptMatrix(weakref.ref(self.edges), self.path)


class KeptMatrix(NamedTuple):
    """Parts of a `Matrix` kept for later calls; its index arrays weakly."""

    edges: weakref.ref[EdgeArrays]
    path: Path | None

    def still(self, adjacency: Tensor) -> bool:
        """Whether it holds for a call over the same adjacency."""
        return (self.edges() is edges_of(adjacency)
                and (self.path is None or (self.path.same() and not _autocast(adjacency))))

    def arguments(self, adjacency: Tensor, kwargs: dict) -> dict[str, Any]:
        return _arguments(adjacency, kwargs, self.path is not None)


def is_matrix(edge_index: Any) -> bool:
    """Whether ``edge_index`` is a sparse matrix of a supported layout."""
    return type(edge_index) is Tensor and edge_index.layout in _LAYOUTS


def read(layer: Any, known: Known, adjacency: Tensor, kwargs: dict) -> Matrix | Reason:
    """The layer's call over such an ``adjacency``, or the reason why it is not known."""
    if capture.capturing():
        return reason("GA204", "a sparse matrix, within the capture of a CUDA graph")
    if layer.flow != "source_to_target":
        return reason("GA202", "a sparse matrix with flow='target_to_source'")
    if adjacency.dim() != 2 or adjacency.values().dim() != 1:
        return reason("GA204", f"the sparse matrix has shape {list(adjacency.shape)}",
                      "one number for each edge")
    if adjacency.layout is torch.sparse_csc and (adjacency.requires_grad or not layer.fuse):
        return reason("GA204", "of a sparse matrix in CSC PyG makes no messages, and torch no "
                      "gradients of its values", "use CSR")
    if not adjacency._nnz():
        return reason("GA303")
    path, form = None, None
    if not layer.fuse and "edge_index" in inspect.signature(known.functions[0]).parameters:
        return reason("GA204", "message takes an edge_index, which PyG makes of no sparse matrix")
    if not layer.fuse and _unclear(layer._user_args, kwargs):
        return reason("GA204", "what the values of the sparse matrix are to the message")
    if layer.fuse:
        path = _path_of_product(known.functions[3])
        form = _not_followed(layer) if path is None else _product(layer, adjacency, kwargs)
    arguments = _arguments(adjacency, kwargs, bool(layer.fuse))
    if form is None:
        form = known.form(arguments, known.stamp(layer))
        if type(form) is Form and form.more is not None:
            form = reason("GA204", "a sparse matrix under messages that are more than "
                          "weighted rows of neighbours")
    if type(form) is Reason:
        return form
    return Matrix(edges_of(adjacency), form, arguments, path)


def _unclear(names: list[str], kwargs: dict) -> bool:
    """Whether PyG would have to put the values of a matrix elsewhere than in the place of an
    ``edge_weight`` that is None: its two ways of collecting ``names`` differ in that."""
    return (("edge_weight" in names and "edge_weight" not in kwargs)
            or ("edge_type" in names and kwargs.get("edge_type") is None))


def _not_followed(layer: Any) -> Reason:
    own = type(layer).message_and_aggregate
    if own.__module__.startswith("torch_geometric."):
        return reason("GA208",
                      f"{type(layer).__name__} multiplies by a sparse matrix in its own way")
    return reason("GA211", "message_and_aggregate is the user's own")


def _product(layer: Any, adjacency: Tensor, kwargs: dict) -> Form | Reason:
    """The form of the messages that a product adds up, or the reason against it where the host
    would refuse, too, or convert."""
    from gnnaccel.adapters.pyg.propagate import reading  # which needs this module

    if reductions.of_module(layer.aggr_module) != (_REDUCES.get(layer.aggr),):
        return reason("GA201", f"a product with a sparse matrix and aggr={layer.aggr!r}")
    x: Any = reading.source(kwargs, "x") if "x" in kwargs else None
    if type(x) not in reading.TENSORS or x.dim() != 2:
        return reason("GA206", "features are no matrix")
    if x.dtype != adjacency.dtype or _autocast(adjacency):
        return reason("GA203", f"{adjacency.dtype} values and {x.dtype} features, or autocast")
    return Form("x", _values)


def _autocast(adjacency: Tensor) -> bool:
    """Whether products may be in another dtype than their operands."""
    return torch.is_autocast_enabled(adjacency.device.type)


def _values(arguments: Arguments) -> Tensor:
    return arguments["adj_t"].values().view(-1, 1)


def _arguments(adjacency: Tensor, kwargs: dict, fused: bool) -> dict[str, Any]:
    """The arguments of ``propagate`` with what PyG adds to them."""
    arguments = {**kwargs, "size": [adjacency.shape[1], adjacency.shape[0]], "adj_t": adjacency}
    if not fused and arguments.get("edge_weight") is None:
        arguments["edge_weight"] = adjacency.values()
    return arguments


def host_refuses(matrix: Matrix, reduce: Any, x: Tensor) -> bool:
    """Whether PyG has no code for this product: that for extrema is for the CPU alone."""
    return matrix.path is not None and reduce in ("max", "min") and x.is_cuda


@functools.cache
def _products() -> dict[Any, type]:
    """The functions ``message_and_aggregate`` that are known, with the class of each."""
    from torch_geometric import nn

    classes = [getattr(nn, name) for name in _MULTIPLYING if hasattr(nn, name)]
    return {cls.message_and_aggregate: cls for cls in classes}


def _path_of_product(function: Any) -> Path | None:
    """Code path of a known ``message_and_aggregate``; None for others, or where it is not what
    the host wrote."""
    cls: Any = _products().get(function)
    if cls is None or cls.message_and_aggregate is not function:
        return None
    path = path_of(cls, _FUSED)
    return path if path.why is None else None


# --- index arrays ---------------------------------------------------------------------------------

#: for each matrix: addresses of its index arrays, and the edges made of them
_kept: TensorMap[tuple[tuple[int, int], EdgeArrays]] = TensorMap()
#: by id, the matrices whose edges were asked for; for lookups that cannot afford a call
read_matrices = _kept.entries


def edges_of(adjacency: Tensor) -> EdgeArrays:
    """The edges of a matrix: the same object for as long as nothing was written to it."""
    of_rows = adjacency.layout is torch.sparse_csr
    pointers, ids = ((adjacency.crow_indices(), adjacency.col_indices()) if of_rows else
                     (adjacency.ccol_indices(), adjacency.row_indices()))
    if adjacency.is_inference():  # which counts no writes
        return _made(pointers, ids, of_rows)
    place = pointers.data_ptr(), ids.data_ptr()
    entry = _kept.get(adjacency)
    if entry is not None and entry[0] == place:
        return entry[1]
    edges = _made(pointers, ids, of_rows)
    _kept.set(adjacency, (place, edges))
    return edges


@torch.inference_mode(False)  # made in inference mode they could not take part in training later
def _made(pointers: Tensor, ids: Tensor, of_rows: bool) -> EdgeArrays:
    pointers, ids = pointers.contiguous(), ids.contiguous()  # torch does not ask for that
    csc = CSC(pointers, ids, ids.new_empty(0))
    # columns are sources: the edges of a matrix in CSC have yet to be grouped by destination
    return EdgeArrays(None, csc) if of_rows else EdgeArrays((destinations(csc), ids))
