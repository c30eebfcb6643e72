"""The row-gather floor is a correct sum wherever rows are whole."""
from __future__ import annotations

import pytest
import torch

from gnnaccel.cuda.traverse.gather import row_gather
from tests.attention_cases import graph
from tests.helpers import assert_accurate, on_devices

pytestmark = pytest.mark.usefixtures("poison")


def reference(view, x, dtype):
    edges = view.edges()
    return torch.zeros(view.num_dst, x.shape[1], dtype=dtype,
                       device=x.device).index_add(0, edges.dst, x.to(dtype)[edges.src])


@on_devices("width", [1, 7, 64, 512], [2, 5, 32, 96, 100, 256, 511])
def test_sums(device, width):
    view = graph(device)
    x = torch.randn(view.num_src, width).to(device)
    assert_accurate("sum", row_gather(view.csc(), x), reference(view, x, torch.float32),
                    reference(view, x, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows(device, dtype):
    view = graph(device, wide=True)
    x = torch.randn(view.num_src, 24).to(device, dtype)
    assert_accurate("sum", row_gather(view.csc(), x), reference(view, x, torch.float32),
                    reference(view, x, torch.float64))


def test_split_rows_are_left_out(device, chunk_edges):
    chunk_edges(16)
    view = graph(device)
    x = torch.randn(view.num_src, 8).to(device)
    out = row_gather(view.csc(), x)
    whole = view.csc().indptr.diff() <= 16
    assert (~whole).any() and (out[~whole] == 0).all()
    torch.testing.assert_close(out[whole], reference(view, x, torch.float32)[whole])


def test_empty_graph(device):
    assert (row_gather(graph(device, 5, 4, 0).csc(), torch.randn(5, 3).to(device)) == 0).all()
