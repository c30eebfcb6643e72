"""Everything that ``enable()`` replaces in the hosts and in torch, with the reason for it.

``python -m gnnaccel.profile.patches`` prints ``docs/patches.md``.
"""
from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    """Replacements of one purpose: those whose dotted path ``pattern`` matches as a whole."""

    title: str
    pattern: str
    why: str


#: host -> its name for readers, and its groups; a path belongs to the first that matches
GROUPS: dict[str, tuple[str, tuple[Group, ...]]] = {
    "pyg": ("PyTorch Geometric", (
        Group("Layers as a whole", r"torch_geometric\.nn\.(conv|dense)\..*\.forward",
              "The wrapper decides whether a kernel runs the call, and calls the class's own "
              "`forward` where none does. Subclasses and their checkpoints are untouched."),
        Group("Message passing of all other layers", r".*\._set_jittable_templates",
              "PyG calls it when a class is first instantiated, to write `propagate` into that "
              "class. Afterwards `propagate` is wrapped, too, in PyG's classes and in your own, so "
              "that sums over neighbours run as one operation. Classes that were instantiated "
              "earlier have theirs wrapped by `enable()`."),
        Group("What depends on the edges alone",
              r".*\.(gcn_norm|(add|remove)(_remaining)?_self_loops|__norm__)|.*\.GCNNorm\.forward",
              "GCN's normalisation and added self loops are computed once for an `edge_index` "
              "rather than at every call. PyG's modules import these functions from each other by "
              "name, so each such name is replaced."),
        Group("Pools, scatter, segment, softmax", r".*\.(scatter|segment|softmax)",
              "On a GPU they run by kernels. Modules import them by name, so each name is "
              "replaced, but not where layers use them inside."),
        Group("Names of edge types", r".*\.ModuleDict\.to_external_key",
              "`HeteroConv` translates its edge types at every call, by comparing each with all "
              "attributes of a class. The answers are remembered."),
        Group("Asking torch whether it compiles", r".*\.is_compiling",
              "PyG's own function of this name only calls torch's, several times in each layer. "
              "The names refer to torch's function directly. The answer is the same."),
        Group("torch: models of `to_hetero`", r"torch\.fx\..*",
              "`to_hetero` makes models whose code calls a layer once for each edge type. How such "
              "models are called is replaced, so that these calls run as one. Other "
              "`GraphModule`s run their own code."),
        Group("torch: scripting", r"torch\.jit\.script",
              "`torch.jit.script` reads the source of what it compiles. While it runs, all "
              "replacements above are taken back, so that it reads the host's."))),
    "dgl": ("DGL", (
        Group("Layers as a whole", r"dgl\.nn\..*\.forward",
              "The wrapper decides whether a kernel runs the call, and calls the class's own "
              "`forward` where none does."),
        Group("Single relations of a heterograph", r".*\.get_relation_graph",
              "It gives the same index object each time, so that the structure built for a "
              "relation is found again."),
        Group("Operations under all message passing",
              r"dgl\.(backend|ops)\..*(spmm|sddmm|edge_softmax|segment_reduce|scatter_add|_mm).*",
              "`update_all`, `apply_edges` and `dgl.ops` all end in these. On a GPU they run by "
              "kernels, on a CPU the host's own run. DGL's modules import them by name, so each "
              "name is replaced."),
        Group("Your own message and reduce functions", r"dgl\.core\.invoke_.*",
              "Nothing changes but that such calls are counted, so that records can say why they "
              "ran natively."))),
    "torch": ("torch", (
        Group("Backward in the calling thread", r"torch\.autograd\._engine_run_backward",
              "Every backward pass goes through this function. Where the process uses one GPU, "
              "backward runs in the thread that asked for it, as with "
              "`torch.autograd.set_multithreading_enabled(False)`, which saves 0.3 to 0.5 ms a "
              "step. `enable(backward=\"workers\")` leaves it to autograd's own threads."),)),
}

_HEAD = """# What is replaced

All that `gnnaccel.enable()` replaces in this process, and why: {count} names with PyG {pyg}, DGL {dgl} and torch {torch}. Other versions
have other names. Classes and modules are changed, never the objects of your model. `gnnaccel.disable()` puts every name back as it
was, and inside `with gnnaccel.disabled():` each replacement does what the original does. `gnnaccel.status()["hosts"]` lists what
is replaced now. `import gnnaccel` alone replaces nothing.

More is replaced in two cases only: `forward` of PyG's `Linear` while a model is [quantized](quantization.md), and, on a machine with a
GPU and a DGL that was built without CUDA, the functions by which [DGL gets to the GPU](dgl.md#how-it-is-done-gnnacceladaptersdglbridge).

This file is made by `python -m gnnaccel.profile.patches`.
"""


def grouped(host: str, paths: Iterable[str]) -> dict[Group, list[str]]:
    """The dotted ``paths`` that are replaced in ``host``, by their group. ValueError for a path
    that no group explains."""
    found: dict[Group, list[str]] = {group: [] for group in GROUPS[host][1]}
    for path in paths:
        group = next((g for g in found if re.fullmatch(g.pattern, path)), None)
        if group is None:
            raise ValueError(f"{path} is replaced, and no group in gnnaccel.profile.patches says "
                             "why: add one")
        found[group].append(path)
    return {group: paths for group, paths in found.items() if paths}


def document() -> str:
    """The whole file. Imports the hosts, enables gnnaccel and disables it again."""
    import torch

    from gnnaccel import adapters, session
    from gnnaccel.profile.doctor.packages import version_of

    for module in ("torch_geometric.nn", "dgl"):
        importlib.import_module(module)
    with session.enabled():
        replaced = {host: list(state["patched"]) for host, state in adapters.state().items()}
    parts = [_HEAD.format(count=sum(map(len, replaced.values())), pyg=version_of("torch_geometric"),
                          dgl=version_of("dgl"), torch=torch.__version__.partition("+")[0])]
    for host, (title, _) in GROUPS.items():
        parts.append(f"## {title}\n")
        for group, paths in grouped(host, replaced[host]).items():
            names = ",\n".join(f"`{path}`" for path in sorted(paths))
            parts.append(f"### {group.title}\n\n{group.why}\n\n{names}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
