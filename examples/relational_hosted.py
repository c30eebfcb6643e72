"""The tasks as PyG's own dataset classes give them, downloaded on first use. Nothing in here is
about gnnaccel."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from relational_npz import FILES
from relational_tasks import EntityTask, HeteroTask, Task


def load(name: str) -> Task:
    """``name`` is "aifb", "mutag" or "dblp". SystemExit with one line if it cannot be had."""
    import platformdirs

    root = Path(platformdirs.user_cache_dir("gnnaccel")) / "relational"
    try:
        return _dblp(root) if name == "dblp" else _entities(root, name)
    except ImportError as error:
        raise SystemExit(f"PyG needs more packages to read {name.upper()} ({error}): pip "
                         "install pandas rdflib scipy. "
                         f"Without them use --data DIR with {FILES[name]} in it.") from None
    except Exception as error:  # whatever the host's download and parsing code raises
        raise SystemExit(
            f"{name.upper()} is not in PyG's cache and could not be downloaded ({_line(error)}). "
                         f"Without a network use --data DIR with {FILES[name]} in it.") from None


def _entities(root: Path, name: str) -> EntityTask:
    from torch_geometric.datasets import Entities

    dataset = Entities(str(root / "entities"), name.upper())
    data = dataset[0]
    return EntityTask(title=f"{name.upper()} (PyG's Entities)", classes=dataset.num_classes,
                      num_nodes=data.num_nodes, num_relations=dataset.num_relations,
                      edge_index=data.edge_index, edge_type=data.edge_type,
                      train_idx=data.train_idx, train_y=data.train_y, test_idx=data.test_idx,
                      test_y=data.test_y)


def _dblp(root: Path) -> HeteroTask:
    from torch_geometric.datasets import DBLP

    data = DBLP(str(root / "dblp"))[0]
    authors = data["author"]
    train, test = (mask.nonzero().flatten() for mask in (authors.train_mask, authors.test_mask))
    return HeteroTask(title="DBLP (PyG's DBLP)", classes=int(authors.y.max()) + 1, target="author",
                      train_idx=train, train_y=authors.y[train], test_idx=test,
                      test_y=authors.y[test],
                      num_nodes={kind: int(data[kind].num_nodes) for kind in data.node_types},
                      x={kind: _float(x) for kind, x in data.x_dict.items()},
                      edges=dict(data.edge_index_dict))


def _float(x: Any) -> torch.Tensor:
    return x.to(torch.float32)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
