"""The row-gather floor (``src/gather.cu``): the least that any aggregation of these rows must
cost."""
from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.cuda.runtime import driver
from gnnaccel.cuda.runtime.launch import THREADS, TYPES, grid, layout_for, workspace
from gnnaccel.cuda.structures.structure import Rows


def row_gather(graph: Rows, x: Tensor) -> Tensor:
    """Sums of the neighbours' rows [rows, F] fp32, F <= 512; rows that are split stay incomplete
    (it is a floor)."""
    layout, launch = layout_for(1, x.shape[1]), graph.launch()
    out = torch.zeros(graph.rows, x.shape[1], dtype=torch.float32, device=x.device)
    memory, (part, _, _) = workspace(launch.chunks, (x.shape[1], 0, 0), x.device)
    defines = layout.defines() + (("ROW_T", TYPES[x.dtype]),
                                  ("OFF_T", "i64" if graph.wide else "int"), ("DROPOUT", "0"))
    driver.current().kernel("gather", "row_gather", defines)(
        grid(launch.slots + graph.rows, layout), THREADS, 0,
        launch.graph[:2] + (launch.graph[3],) + launch.split + (x.data_ptr(), out.data_ptr(), part))
    return out
