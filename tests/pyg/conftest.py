"""A clean session around each test, and the routes that are held against the host's own layers."""
from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from tests.routes import (by_torch, clean, emulated, gpu, kernels, one_thread, route,  # noqa: F401
                          stated)


@pytest.fixture
def inputs(route):
    """Features and edges of a graph."""
    from tests.pyg import graphs

    return graphs.features().to(route.device), graphs.square().to(route.device)


@pytest.fixture(scope="session", autouse=True)
def made_with_a_sum():
    """PyG writes a class's ``propagate`` for its first layer. Were that one with a median, products
    with sparse matrices would be errors in all later layers of the class."""
    from torch_geometric.nn import SAGEConv

    SAGEConv(1, 1)
