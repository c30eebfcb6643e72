"""The one thing that ``import gnnaccel`` does: a finder that is asked about ``dgl.graphbolt``, so
that ``import dgl`` works where that part of DGL cannot be loaded.

It answers for no other module, and for this one only when it is looked for, which is when DGL is
imported. What it then decides is in `gnnaccel.adapters.dgl.standin`.
"""
from __future__ import annotations

import sys

NAME = "dgl.graphbolt"
_PREFIX = NAME + "."


class GraphboltFinder:
    """Finds ``dgl.graphbolt`` and modules inside it where DGL's own cannot be loaded; nothing
    else."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME and not name.startswith(_PREFIX):
            return None
        from gnnaccel.adapters.dgl import standin

        return standin.find_spec(name, path, target)


def install() -> None:
    """Ask this finder before the others; again is without effect."""
    if not any(finder is GraphboltFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, GraphboltFinder)
