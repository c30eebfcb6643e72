"""Limits of a DGL without CUDA: one error, naming the limit and what to do instead; and one warning
where the host works in place of the GPU."""
from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

from gnnaccel.adapters.dgl.bridge.tags import device_of
from gnnaccel.adapters.dgl.sparse import finder
from gnnaccel.adapters.patching import PatchSet
from gnnaccel.dispatch.observe.decisions import callers_level
from gnnaccel.dispatch.policy.reasons import reason
from gnnaccel.errors import HostLimitError

_WHY = "this DGL was built without CUDA, and gnnaccel keeps its graphs on the host"
_LIMITS = {
    "uva": "DGL cannot pin graphs or features for access from the GPU (UVA, pin_memory_)",
    "adam": "SparseAdam(use_uva=True) cannot pin its state for access from the GPU",
    "cache": "DGL has no GPUCache",
    "partition": "DGL cannot partition a graph that is on the GPU",
    "sparse": "dgl.sparse cannot be loaded, and g.adj(), which needs it, cannot be had",
}
#: limits that have another cause than a DGL without CUDA
_CAUSES = {
    "partition": "DGL does that on the CPU alone, whether it was built with CUDA or not",
    "sparse": "this DGL has no dgl_sparse library for torch {torch}, {known}",
}
_INSTEAD = {
    "uva": "Leave the graph and its features as they are, and ids on the CPU: "
           "DataLoader(graph, ids, ..., device='cuda') copies each batch",
    "adam": "Leave use_uva off: the state stays on the CPU, and each step's gradients are copied "
            "there",
    "cache": "Leave gpu_cache off",
    "partition": "Partition g.cpu(), then move the parts",
    "sparse": "Call gnnaccel.standins('dgl.sparse') before the import, which gives it over torch's "
              "operations, or use one of these versions of torch, or g.adj_external()",
}

#: work of the host in place of the GPU
_TOLD = {
    "uva": "DataLoader(use_uva=True) samples on the CPU and copies each batch to the GPU",
    "sampling": "a graph on the GPU is sampled on the CPU",
}

#: C function -> limit that a call for something on the GPU meets
_FUNCTIONS = {
    "_CAPI_DGLIndexSelectCPUFromGPU": "uva",
    "_CAPI_DGLIndexScatterGPUToCPU": "uva",
    "_CAPI_DGLSampleNeighbors": "sampling",
    "_CAPI_DGLSampleNeighborsFused": "sampling",
    "_CAPI_DGLSampleNeighborsEType": "sampling",
    "_CAPI_DGLSampleNeighborsBiased": "sampling",
    "_CAPI_DGLSampleNeighborsTopk": "sampling",
    "_CAPI_DGLSampleLabors": "sampling",
    "_CAPI_DGLGlobalUniformNegativeSampling": "sampling",
    "_CAPI_DGLSamplingRandomWalk": "sampling",
    "_CAPI_DGLSamplingRandomWalkWithRestart": "sampling",
    "_CAPI_DGLSamplingRandomWalkWithStepwiseRestart": "sampling",
    "_CAPI_DGLSamplingNode2vec": "sampling",
    "_CAPI_DGLSamplingSelectPinSageNeighbors": "sampling",
    "_CAPI_DGLPartitionWithHalo_Hetero": "partition",
}


#: C function -> where among its arguments the numbers of neighbours to sample are
_FANOUTS = {"_CAPI_DGLSampleNeighbors": 2}

_sampling = threading.local()


def check(function: str | None, args: tuple) -> None:
    """Check a call of a C function with something that is on the GPU. Raises HostLimitError if only
    a CUDA build has it there; warns once if the host samples instead.

    Taking all neighbours is no sampling, but what ``in_subgraph`` does.
    """
    limit = None if function is None else _FUNCTIONS.get(function)
    if function is None or limit is None:
        return
    if limit != "sampling":
        refuse(limit)
    if not getattr(_sampling, "allowed", False) and not _takes_all(function, args):
        tell(limit)


def _takes_all(function: str, args: tuple) -> bool:
    at = _FANOUTS.get(function)
    return at is not None and all(number == -1 for number in args[at].asnumpy().tolist())


def _by_the_host(sample: Callable) -> Callable:
    """``sample``, a function of DGL's, without the warning: DGL itself calls it for a few nodes."""
    @functools.wraps(sample)
    def by_the_host(*args: Any, **kwargs: Any) -> Any:
        before, _sampling.allowed = getattr(_sampling, "allowed", False), True
        try:
            return sample(*args, **kwargs)
        finally:
            _sampling.allowed = before

    return by_the_host


def text(limit: str) -> str:
    """The message of a limit: what cannot be had, why, and what to do instead."""
    why = _CAUSES.get(limit, _WHY)
    if limit == "sparse":
        version, versions = _sparse_libraries()
        why = why.format(torch=version, known=(f"only for {', '.join(versions)}" if versions
                                               else "nor for any other"))
    return f"{_LIMITS[limit]}: {why}. {_INSTEAD[limit]}."


def refuse(limit: str) -> NoReturn:
    """Raise HostLimitError for this limit."""
    raise HostLimitError(text(limit))


_told: set[str] = set()


def tell(what: str) -> None:
    """Warn, once in a process, that the host does this."""
    if what not in _told:
        _told.add(what)
        why = reason("GA409", f"{_TOLD[what]}: this DGL was built without CUDA")
        warnings.warn(f"gnnaccel: {why} ({why.hint})", RuntimeWarning,
                      stacklevel=callers_level("gnnaccel", "torch", "dgl"))


def install(patches: PatchSet) -> None:
    """Refuse where DGL itself would fail without saying why."""
    from dgl import distributed
    from dgl.cuda import gpu_cache
    from dgl.distributed import partition
    from dgl.nn.pytorch import network_emb
    from dgl.transforms import functional

    from gnnaccel.finder import GraphboltFinder

    patches.set(gpu_cache.GPUCache, "__init__", lambda self, *args, **kwargs: refuse("cache"),
                "Raises an error that says that this DGL has no `GPUCache`.")
    # for layers that learn from random walks
    patches.set(network_emb, "random_walk", _by_the_host(network_emb.random_walk),
                "Lets `MetaPath2Vec` and `DeepWalk` walk over a graph on the GPU; the host walks.")
    # for graphs of k nearest neighbours, where a node has a neighbour too many
    patches.set(functional, "sample_neighbors", _by_the_host(functional.sample_neighbors),
                "Lets graphs of nearest neighbours drop a neighbour too many, on the host.")
    new = _on_the_host(partition.partition_graph)
    for module in (partition, distributed):
        patches.set(module, "partition_graph", new,
                    "Raises an error that says that only graphs on the CPU can be partitioned.")
    # our own finder, which is asked before all others, and for dgl.sparse while the bridge is in
    patches.set(GraphboltFinder, "find_spec", staticmethod(_no_sparse(GraphboltFinder.find_spec)),
                "Explains why `dgl.sparse` cannot be imported where it has no library for this "
                "torch. The class is gnnaccel's own.")


def _on_the_host(partition_graph: Callable) -> Callable:
    """``partition_graph``, for graphs on the host."""
    @functools.wraps(partition_graph)
    def on_the_host(g: Any, *args: Any, **kwargs: Any) -> Any:
        if device_of(g._graph) is not None:
            refuse("partition")
        return partition_graph(g, *args, **kwargs)

    return on_the_host


def _no_sparse(native: Callable) -> Callable:
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "dgl.sparse" and not _has_sparse():
            raise ImportError(text("sparse"), name=name)
        return native(name, path, target)

    return find_spec


def _has_sparse() -> bool:
    """Whether DGL has a sparse library for this torch."""
    version, versions = _sparse_libraries()
    return version in versions


def _sparse_libraries() -> tuple[str, list[str]]:
    """The version of torch, and those that DGL has a sparse library for."""
    import dgl

    return finder.libraries(Path(dgl.__path__[0]))
