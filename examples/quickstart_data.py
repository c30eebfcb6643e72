"""Data and memory measurement for quickstart.py: nothing in here is about gnnaccel."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.utils import coalesce, to_undirected

import code_graph


@dataclass
class Data:
    """N nodes with F features, E edges in both directions."""

    title: str
    x: torch.Tensor  # [N, F] float32
    y: torch.Tensor  # [N] int64, -1 where there is no label
    edge_index: torch.Tensor  # [2, E] int64
    train_mask: torch.Tensor  # [N] bool
    val_mask: torch.Tensor  # [N] bool
    test_mask: torch.Tensor  # [N] bool
    classes: int


def load_data(name: str, device: torch.device) -> Data:
    """``name`` is "code", "cora" or the path of an .npz file. SystemExit with one line if it cannot
    be had."""
    if name == "code":
        graph = code_graph.load()
        arrays, title = vars(graph), f"Code graph: {code_graph.summary(graph)}"
    elif name == "cora":
        arrays, title = _cora(), "Cora (Planetoid)"
    else:
        arrays, title = _npz(Path(name)), name
    y = torch.as_tensor(np.asarray(arrays["y"], np.int64))
    masks = [np.asarray(arrays[key], bool) for key in ("train_mask", "val_mask", "test_mask")
             if key in arrays]
    if len(masks) < 3:
        masks = list(code_graph.split(y.numpy()))
    x = torch.as_tensor(np.asarray(arrays["x"], np.float32))
    edges = torch.as_tensor(np.asarray(arrays["edge_index"], np.int64))
    edges = to_undirected(coalesce(edges, num_nodes=len(x)), num_nodes=len(x))
    tensors = [tensor.to(device) for tensor in (x, y, edges, *map(torch.as_tensor, masks))]
    return Data(title, *tensors, classes=int(y.max()) + 1)


def _npz(path: Path) -> dict:
    if not path.is_file():
        raise SystemExit(
            f"{path} is not a file; --data takes code, cora or the path of an .npz file")
    with np.load(path) as data:
        missing = [key for key in ("edge_index", "x", "y") if key not in data]
        if missing:
            raise SystemExit(f"{path} has no {', '.join(missing)}; it needs edge_index [2, "
                             "E], x [N, F] and y [N]")
        return dict(data)


def _cora() -> dict:
    import platformdirs
    from torch_geometric.datasets import Planetoid

    root = Path(platformdirs.user_cache_dir("gnnaccel")) / "planetoid"
    try:
        data = Planetoid(str(root), "Cora")[0]
    except Exception as error:  # whatever the host's download code raises
        raise SystemExit(f"Cora is not in {root} and could not be downloaded ({error}). "
                         "Without a network use --data code, or --data PATH.npz.") from None
    return {key: data[key].numpy()
            for key in ("x", "y", "edge_index", "train_mask", "val_mask", "test_mask")}


class PeakMemory:
    """Peak memory from now on, in bytes: what torch allocated on a GPU, or how far a CPU process
    grew (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            try:
                # sets the peak back to the present size
                Path("/proc/self/clear_refs").write_text("5")
                self.start = self._resident()
            except OSError:
                pass

    def read(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None if self.start is None else max(0, self._resident() - self.start)

    @staticmethod
    def _resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
