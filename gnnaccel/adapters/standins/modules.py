"""The packages that are stood in for, their modules, and where the functions are."""
from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_HOME = "gnnaccel.adapters.standins."
#: submodule -> (module of ours, names)
_Table = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Package:
    """A stand-in. ``version``: of the package whose interface is followed. ``modules``: its
    submodules. ``inner``: submodules whose names the package does not have itself. ``hints``: what
    to do instead of a name that is not there; the one for "" is for all others."""

    version: str
    modules: _Table
    hints: dict[str, str]
    inner: tuple[str, ...] = field(default=("utils",))

    def names(self, submodule: str) -> dict[str, Any]:
        """The names and values of a submodule."""
        home, names = self.modules[submodule]
        module = importlib.import_module(_HOME + home)
        return {name: getattr(module, name) for name in names.split()}

    def filled(self, module: ModuleType) -> dict[str, Any]:
        """Give the package its submodules. Returns its names and values, which cover submodules of
        the same name, as in the originals."""
        for submodule in self.modules:
            importlib.import_module(f"{module.__name__}.{submodule}")
        module.__dict__["__version__"] = self.version
        return {name: value for submodule in self.modules if submodule not in self.inner
                for name, value in self.names(submodule).items()}

    def hint(self, name: str) -> str:
        """Advice where ``name`` is not there."""
        return self.hints.get(name, self.hints[""])


def _real(distribution: str) -> str:
    return f"install {distribution} itself, which is then taken instead, or do without it"


_PYG_LIB = "install pyg-lib and use torch_geometric.loader.{}, which takes its functions from there"

PACKAGES = {
    "torch_scatter": Package("2.1.2", {
        "utils": ("scatter.reduce", "broadcast"),
        "scatter": ("scatter.reduce", "scatter_sum scatter_add scatter_mul scatter_mean "
                    "scatter_min scatter_max scatter"),
        "segment_coo": ("scatter.segment", "segment_sum_coo segment_add_coo segment_mean_coo "
                        "segment_min_coo segment_max_coo segment_coo gather_coo"),
        "segment_csr": ("scatter.segment", "segment_sum_csr segment_add_csr segment_mean_csr "
                        "segment_min_csr segment_max_csr segment_csr gather_csr"),
        "composite": ("scatter.composite", "scatter_std scatter_logsumexp scatter_softmax "
                      "scatter_log_softmax"),
        "composite.std": ("scatter.composite", "scatter_std"),
        "composite.logsumexp": ("scatter.composite", "scatter_logsumexp"),
        "composite.softmax": ("scatter.composite", "scatter_softmax scatter_log_softmax"),
    }, {"": _real("torch-scatter")}),
    "torch_sparse": Package("0.6.18", {
        "storage": ("sparse.storage", "SparseStorage"),
        "tensor": ("sparse.tensor", "SparseTensor"),
        "transpose": ("sparse.functions", "t transpose"),
        "narrow": ("sparse.selecting", "narrow __narrow_diag__"),
        "select": ("sparse.selecting", "select"),
        "index_select": ("sparse.selecting", "index_select index_select_nnz"),
        "masked_select": ("sparse.selecting", "masked_select masked_select_nnz"),
        "permute": ("sparse.selecting", "permute"),
        "diag": ("sparse.diagonal", "remove_diag set_diag fill_diag get_diag"),
        "add": ("sparse.arithmetic", "add add_ add_nnz add_nnz_"),
        "mul": ("sparse.arithmetic", "mul mul_ mul_nnz mul_nnz_"),
        "reduce": ("sparse.totals", "sum mean min max reduction"),
        "matmul": ("sparse.product", "matmul"),
        "cat": ("sparse.joining", "cat"),
        "rw": ("sparse.sampling", "random_walk"),
        "bandwidth": ("sparse.sampling", "reverse_cuthill_mckee"),
        "saint": ("sparse.sampling", "saint_subgraph"),
        "sample": ("sparse.sampling", "sample sample_adj"),
        "convert": ("sparse.functions", "to_torch_sparse from_torch_sparse to_scipy from_scipy"),
        "coalesce": ("sparse.functions", "coalesce"),
        "eye": ("sparse.functions", "eye"),
        "spmm": ("sparse.functions", "spmm"),
        "spspmm": ("sparse.functions", "spspmm"),
        "spadd": ("sparse.functions", "spadd"),
    }, {"": _real("torch-sparse"), "partition": _PYG_LIB.format("ClusterData"),
        "metis": _PYG_LIB.format("ClusterData"), "neighbor_sample": _PYG_LIB.format(
            "NeighborLoader"), "hetero_neighbor_sample": _PYG_LIB.format("NeighborLoader"),
        "hgt_sample": "use torch_geometric.loader.NeighborLoader with pyg-lib installed"}),
    "torch_cluster": Package("1.6.3", {
        "knn": ("cluster.neighbours", "knn knn_graph"),
        "radius": ("cluster.neighbours", "radius radius_graph"),
        "nearest": ("cluster.neighbours", "nearest"),
        "fps": ("cluster.grouping", "fps"),
        "grid": ("cluster.grouping", "grid_cluster"),
        "graclus": ("cluster.grouping", "graclus_cluster"),
        "rw": ("cluster.walks", "random_walk"),
    }, {"": _real("torch-cluster"), "neighbor_sampler": _PYG_LIB.format("NeighborLoader"),
        "sampler": _PYG_LIB.format("NeighborLoader")}),
}
