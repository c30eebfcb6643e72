"""docs/layers.md says of every layer of PyG which way it goes. ``python -m
tests.pyg.test_layer_table`` writes the table anew."""
from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

from gnnaccel.adapters import seams
from gnnaccel.adapters.pyg import LAYERS
from gnnaccel.adapters.pyg.propagate import reading
from gnnaccel.dispatch.policy.reasons import Reason

#: layers whose messages kernels are written for: `test_generated_messages`,
#: `test_generated_extrema`, `test_edge_messages` and `test_matrix_products` run them
GENERATED = dict.fromkeys(("CGConv", "DynamicEdgeConv", "EdgeConv", "FAConv", "FeaStConv", "GMMConv",
                           "GeneralConv", "PointGNNConv", "PointNetConv", "PointTransformerConv"),
                          "its aggregation, on a GPU")
PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
HEAD = "| layer | way |\n|---|---|\n"


def way(name: str) -> str | None:
    cls = getattr(nn, name)
    if name in LAYERS:
        return {"FiLMConv": "as a whole; with one relation its aggregation, on a GPU",
                "NNConv": "as a whole, its sums and means; else its aggregation, on a GPU"}.get(
                    name, "as a whole")
    if not (isinstance(cls, type) and issubclass(cls, MessagePassing)) or cls is MessagePassing:
        return None
    if "self.propagate(" not in inspect.getsource(inspect.getmodule(cls)):
        return "native: it does not propagate"
    known = reading.known_class(cls)
    arguments = [p for p in inspect.signature(cls.message).parameters if p != "self"]
    # pairs stand for tensors
    kwargs = {p.removesuffix("_j").removesuffix("_i"): (None, None) for p in arguments}
    taken = []
    for given in ({**kwargs, "edge_attr": None}, kwargs):
        form = known.form(given, known.stock and known.stock.usual)
        if type(form) is not Reason:
            taken.append(form)
    if not taken and name in GENERATED:
        return GENERATED[name]
    if not taken:
        return f"native: {form.text.replace(f'{name} ', 'it ')}"
    usual = inspect.signature(cls).parameters.get("aggr")
    if (usual is not None and usual.default in ("softmax", "powermean")
        and any(form.more is not None for form in taken)):
        return "its aggregation; native with `edge_attr` and a power mean"
    return "its aggregation"


def table() -> str:
    rows = {name: way(name) for name in sorted({*nn.conv.__all__, *LAYERS})}
    return HEAD + "".join(f"| `{name}` | {found} |\n" for name, found in rows.items() if found)


def test_the_table_is_current():
    if not seams.compare("pyg").known:
        pytest.skip("the table is about the newest PyG that is supported")
    assert table() in PAGE.read_text(), "run python -m tests.pyg.test_layer_table"


def test_the_layers_that_must_gain_do():
    for name in ("GCNConv", "SAGEConv", "GraphConv", "GINConv", "SGConv", "TAGConv", "SSGConv",
                 "APPNP", "LGConv", "MixHopConv", "GCN2Conv", "ARMAConv", "ChebConv",
                 "ClusterGCNConv", "GatedGraphConv", "SignedConv", "SimpleConv", "GINEConv",
                 "LEConv", "EGConv", "ResGatedGraphConv"):
        assert way(name) == "its aggregation", name
    assert way("GENConv") == "its aggregation; native with `edge_attr` and a power mean"


if __name__ == "__main__":
    text = PAGE.read_text()
    start = text.index(HEAD)
    end = text.find("\n\n", start)
    PAGE.write_text(text[:start] + table() + ("" if end < 0 else text[end + 1:]))
