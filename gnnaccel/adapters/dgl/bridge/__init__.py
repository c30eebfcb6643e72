"""DGL on a GPU where DGL was built without CUDA: graphs on the host that count as being on the GPU.

PyPI has DGL for CPUs only. Next to a torch with CUDA, all that it lacks are its C functions for a
GPU: frames, layers and losses are torch's. So here a graph on the GPU is a *tagged* one: its index
object is another handle on the same host structure, and carries the device (`tags`). Results of
DGL's C functions of tagged arguments are tagged (`calls`). Tensors go to the host on their way in
and to the device on their way out (`arrays`). The questions that training asks of a structure in
every step are answered from device tensors that are kept with the index object (`index`,
`results`), and layers look for nodes without edges once per graph (`zero_degree`). Sparse
embeddings and filters of ids run on torch operations (`embeddings`, `filters`). Loaders sample on
the host and copy batches ahead (`loader`), and `to_simple` runs there (`simple`). Calls that need a
CUDA build raise an error that says so (`limits`).

Installed only where DGL has no CUDA device API and torch has a GPU, and taken out like every other
patch.
"""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.patching import PatchSet

_OFF = "gnnaccel is disabled, or DGL is not imported"
_patches: PatchSet | None = None
_text = _OFF


def install(patches: PatchSet) -> None:
    """Bridge DGL, unless `reason_against` names a reason."""
    global _patches, _text
    why = reason_against()
    _patches, _text = None, why or _OFF
    if why is not None:
        return
    replace(patches)
    _patches = patches
    _text = (
        "this DGL was built without CUDA: structures stay on the host, features and layers run on "
             "the GPU")


def replace(patches: PatchSet) -> None:
    """Install all patches of the bridge, whether it has a use here or not."""
    from gnnaccel.adapters.dgl.bridge import (arrays, calls, embeddings, filters, index, limits,
                                              loader, simple, zero_degree)

    for module in (calls, arrays, index, embeddings, filters, limits, loader, simple,
                   zero_degree):
        module.install(patches)


def state() -> dict[str, Any]:
    """Whether graphs can be put on a GPU by way of the bridge: ``active``, and ``text``, which says
    why (not)."""
    active = _patches is not None and len(_patches) > 0
    return {"active": active, "text": _text if active or _patches is None else _OFF}


def reason_against() -> str | None:
    """Why DGL, which can be imported, is not bridged here; None where it is when gnnaccel is
    enabled."""
    from dgl._ffi.function import get_global_func

    if get_global_func("device_api.cuda", allow_missing=True) is not None:
        return "this DGL was built with CUDA and needs no bridge"
    return None if has_accelerator() else "torch sees no GPU"


def has_accelerator() -> bool:
    """Whether torch can use a GPU."""
    import torch

    return torch.cuda.is_available()
