"""What a DGL without CUDA cannot be made to do: one error, naming the limit and what to do instead."""
from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

from gnnaccel.adapters.patching import PatchSet
from gnnaccel.errors import HostLimitError

_WHY = "this DGL was built without CUDA, and gnnaccel keeps its graphs on the host"
_LIMITS = {
    "uva": "DGL cannot pin graphs or features for access from the GPU (UVA, pin_memory_)",
    "sampling": "DGL cannot sample a graph that is on the GPU",
    "nccl": "DGL cannot partition ids on the GPU, nor exchange them by NCCL",
    "cache": "DGL has no GPUCache",
    "sparse": "dgl.sparse cannot be loaded",
}
_INSTEAD = {
    "uva": "Leave use_uva off and the graph on the CPU: DataLoader(graph, ..., device='cuda') copies each batch",
    "sampling": "Keep the graph and the seed nodes on the CPU: DataLoader(graph, ..., device='cuda') copies each sample to the "
                "GPU, and num_workers samples ahead",
    "nccl": "Use sparse embeddings on the CPU, or dense ones with torch's DistributedDataParallel",
    "cache": "Leave gpu_cache off",
    "sparse": "Use DGL's message passing, or torch.sparse",
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
    "_CAPI_DGLNDArrayPartitionGeneratePermutation": "nccl",
    "_CAPI_DGLNDArrayPartitionMapToLocal": "nccl",
    "_CAPI_DGLNDArrayPartitionMapToGlobal": "nccl",
}


def check(function: str | None) -> None:
    """Before a call of a C function with something that is on the GPU: HostLimitError if only a CUDA build has it there."""
    limit = _FUNCTIONS.get(function)
    if limit is not None:
        refuse(limit)


def text(limit: str) -> str:
    """What cannot be had, why, and what to do instead."""
    return f"{_LIMITS[limit]}: {_WHY}. {_INSTEAD[limit]}."


def refuse(limit: str) -> NoReturn:
    """Raise the one error."""
    raise HostLimitError(text(limit))


def install(patches: PatchSet) -> None:
    """Refuse where DGL itself would fail without saying why."""
    from dgl.cuda import gpu_cache

    from gnnaccel.finder import GraphboltFinder

    patches.set(gpu_cache.GPUCache, "__init__", lambda self, *args, **kwargs: refuse("cache"))
    # our own finder, which is asked before all others, and for dgl.sparse while the bridge is in
    patches.set(GraphboltFinder, "find_spec", staticmethod(_no_sparse(GraphboltFinder.find_spec)))


def _no_sparse(native: Callable) -> Callable:
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "dgl.sparse" and not _has_sparse():
            raise ImportError(text("sparse"), name=name)
        return native(name, path, target)

    return find_spec


def _has_sparse() -> bool:
    """Whether DGL has a sparse library for this torch."""
    import torch
    from dgl._ffi import libinfo

    folder = Path(libinfo.find_lib_path()[0]).parent / "dgl_sparse"
    return any(folder.glob(f"*dgl_sparse_pytorch_{torch.__version__.split('+', maxsplit=1)[0]}.*"))
