"""Writes docs/patches.md: all that `gnnaccel.enable()` replaces with the installed hosts, and why.

    python -m tests.record_patches            writes the page
    python -m tests.record_patches --check    says by the exit status whether it is up to date

Replacements and reasons are read from the patch sets, in a process of its own: which modules have
a name to be replaced depends on what was imported before.
"""
from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import gnnaccel  # noqa: F401  (before dgl)
from gnnaccel import adapters
from gnnaccel.adapters.contract import Host
from gnnaccel.adapters.patching import Patch, PatchSet

PAGE = Path(__file__).resolve().parents[1] / "docs" / "patches.md"

_HEAD = """\
# What enable() replaces

`gnnaccel.enable()` replaces functions and methods of the packages that it accelerates, and `gnnaccel.disable()` puts the originals
back, the very same objects. Classes are patched, never instances: parameters, checkpoints and pickles do not change. Each replacement
calls the original wherever gnnaccel does not take over, and inside `torch.compile`.

This page lists every replacement with its reason, for {versions}.
A function that the modules of a package import from each other by name is replaced in each of these modules, so one function may appear
many times. `gnnaccel.status()["hosts"]` lists the replacements of your own process. The page is written by
`python -m tests.record_patches`, and a test checks that it is complete.

`import gnnaccel` itself replaces nothing. It adds an import finder to `sys.meta_path`, which stands in for `dgl.graphbolt` where that
cannot be imported ([DGL](dgl.md)). While `enable()` waits for a package to be imported, a second finder tells it when that happens.
"""
_TITLES = {
    "torch": "## Functions of torch\n\nOther code calls these, too, so here is more about each of them.",
    "torch_geometric": "## Functions of PyG",
    "dgl": "## Functions of DGL",
    "later": "## Replaced later\n\nThese are replaced in PyG after `enable()`, when they are first needed.",
    "bridge": "## Functions of DGL, where it was built without CUDA\n\nThese are replaced only where torch has a GPU that this "
              "DGL cannot use ([DGL](dgl.md)). What is not on a GPU goes to the original.",
}
_OTHERS = (", and that of every other class of message passing whose `forward` is not replaced; of `FiLMConv`, for "
           "layers with one relation")


def collect() -> dict[str, list[Patch]]:
    """The replacements by section of the page; everything is as before afterwards."""
    found: dict[str, list[Patch]] = {name: [] for name in _TITLES}
    for host, (module, package) in adapters.HOSTS.items():
        importlib.import_module(module)
        given, patches = adapters._contract(package), PatchSet()
        try:
            given.install(patches)
            if host == "torch":
                given.on_demand(patches)
            for patch in patches:
                found["torch" if patch.path.startswith("torch.") else module.partition(".")[0]
                      ].append(patch)
            if host == "pyg":
                found["later"] += _later(given, patches)
            if host == "dgl":
                found["bridge"] += _bridge(patches)
        finally:
            patches.restore()
    return found


def _later(given: Host, patches: PatchSet) -> Iterable[Patch]:
    """What a quantized model, and the first instance of a class of message passing, bring."""
    from torch_geometric.nn import GCNConv

    before = len(patches)
    given.on_demand(patches)
    GCNConv(1, 1)
    return list(patches)[before:]


def _bridge(patches: PatchSet) -> Iterable[Patch]:
    """What is replaced beside all else where DGL cannot reach the GPU."""
    from gnnaccel.adapters.dgl import bridge

    before = len(patches)
    bridge.replace(patches)
    return list(patches)[before:]


def page() -> str:
    """The page's text."""
    import torch

    # the bridge has its own section, also where there is a GPU
    if torch.cuda.is_available():
        raise SystemExit("run it with CUDA_VISIBLE_DEVICES= (nothing)")
    found = collect()
    parts = [_HEAD.format(versions=versions())]
    for name, patches in found.items():
        parts += [f"{_TITLES[name]}\n", *(map(_in_full, patches) if name == "torch"
                                          else _by_reason(patches))]
    return "\n".join(parts)


def versions() -> str:
    """The installed hosts, as the page names them."""
    import dgl
    import torch
    import torch_geometric

    return (f"torch {_plain(torch)}, PyG {_plain(torch_geometric)} and DGL {_plain(dgl)}")


def _plain(module: object) -> str:
    return module.__version__.partition("+")[0]


def _in_full(patch: Patch) -> str:
    return (f"### `{patch.path}`\n\n{_filled(patch.why)}\n\n"
            f"{_filled(f'**When it does anything.** {patch.active}')}\n\n"
            f"{_filled(f'**What it costs.** {patch.cost}')}\n")


def _by_reason(patches: Iterable[Patch]) -> Iterable[str]:
    """A paragraph for each reason, with a list of what it is the reason of, by module or class."""
    groups: dict[str, dict[str, list[str]]] = {}
    for patch in patches:
        owner, _, name = patch.path.rpartition(".")
        groups.setdefault(patch.why, {}).setdefault(owner, []).append(name)
    for why, owners in groups.items():
        yield _filled(why) + "\n"
        yield from (f"- `{owner}`: {', '.join(f'`{name}`' for name in sorted(owners[owner]))}"
                    f"{_OTHERS if owners[owner] == ['propagate'] and owner[-14:] != 'MessagePassing' else ''}"
                    for owner in sorted(owners))
        yield ""


def _filled(text: str) -> str:
    return textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
