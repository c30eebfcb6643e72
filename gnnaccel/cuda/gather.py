"""The row-gather floor (``src/gather.cu``): what any aggregation of these rows must at least cost."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnaccel.cuda import driver
from gnnaccel.cuda.launch import THREADS, Workspace, split_args, whole_blocks
from gnnaccel.cuda.layout import TYPES, grid, layout_for
from gnnaccel.cuda.structure import Rows


def row_gather(graph: Rows, x: Tensor) -> Tensor:
    """Sums of the neighbours' rows [rows, F] fp32, F <= 512; rows that are split stay incomplete (it is a floor)."""
    layout = layout_for(1, x.shape[1])
    chunks = graph.split.sizes()[0]
    slots = whole_blocks(chunks)
    out = torch.zeros(graph.rows, x.shape[1], device=x.device)
    work = Workspace([chunks * x.shape[1]], x.device)
    defines = layout.defines() + (("ROW_T", TYPES[x.dtype]), ("OFF_T", "i64" if graph.wide else "int"), ("DROPOUT", "0"))
    driver.current().kernel("gather", "row_gather", defines)(
        grid(slots + graph.rows, layout), THREADS, 0,
        (graph.indptr.data_ptr(), graph.other.data_ptr(), np.int32(graph.rows)) + split_args(graph, slots)
        + (x.data_ptr(), out.data_ptr()) + tuple(work.pointers))
    return out
