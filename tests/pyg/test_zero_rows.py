"""An ``aggregate`` that adds messages to zeros by torch's own functions."""
from __future__ import annotations


import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gnnaccel
from tests.pyg import graphs
from tests.pyg.generated_calls import both, routes
from tests.pyg.generated_layers import WIDTH, Message
from tests.pyg.graphs import M, N
from tests.pyg.judge import compare
from tests.pyg.test_generated_changes import each_seen

TAKEN = r"""
z = torch.zeros(dim_size, inputs.size(1), LIKE)\nz.index_add_(0, index, inputs)\nreturn z
z = inputs.new_zeros(dim_size, inputs.shape[-1])\nreturn z.index_add(-2, index, inputs) * 2
return torch.index_add(torch.zeros((dim_size, 12)).to(inputs), 0, index, inputs).sigmoid()
return torch.zeros(dim_size, 12, LIKE).index_add_(0, index=index, source=inputs)
z = torch.zeros(dim_size, 12).to(inputs)\nreturn z.scatter_add_(0, SPREAD, inputs)
return ZEROS.scatter_add(0, index.view(-1, 1).expand(-1, inputs.size(1)), inputs)
return inputs.new_zeros((dim_size, 12)).scatter_add(0, index[:, None].repeat(1, 12), src=inputs)
return torch.scatter_add(ZEROS, 0, index.view(-1, 1).expand(inputs.size()), inputs)
z = ZEROS\nreturn z.index_add(0, index, inputs) + z.index_add(0, index, inputs.abs())
return ZEROS.scatter_reduce_(0, SPREAD, inputs, reduce='sum')
return ZEROS.scatter_reduce(0, SPREAD, inputs, 'amax', include_self=False)
return torch.scatter_reduce(ZEROS, 0, SPREAD, inputs, 'mean', include_self=False)
out = ZEROS\nout.index_add_(0, index, inputs)\nout += 1\nreturn out
out = ZEROS\nreturn out.index_add_(0, index, inputs).index_add_(0, index, inputs)
""".strip().split("\n")

NATIVE = r"""
return ZEROS.scatter_reduce(0, SPREAD, inputs, 'mean')
return ZEROS.scatter_reduce(0, SPREAD, inputs, 'amax')
return ZEROS.scatter_reduce(0, SPREAD, inputs, 'prod', include_self=False)
return ZEROS.scatter_add(0, index.view(-1, 1), inputs)
return ZEROS.scatter_add(0, index.view(-1, 1).expand(-1, 5), inputs)
return ZEROS.scatter_add(0, index.view(1, -1), inputs)
return inputs.new_zeros(dim_size, 14).scatter_add(0, SPREAD, inputs)
return ZEROS.index_add(0, index, inputs, alpha=2)
return inputs.new_ones(dim_size, 12).index_add(0, index, inputs)
return inputs.new_zeros(12, dim_size).index_add(1, index, inputs.t())
return inputs.new_zeros(30, 12).index_add(0, index, inputs)
return ZEROS
out = ZEROS\nout += 1\nreturn out.index_add_(0, index, inputs)
return ZEROS.index_add(0, index, inputs) if f'{inputs.device}' else 0
return ZEROS.index_add(0, index, inputs) if inputs.device.type > 'a' else inputs
""".strip().split("\n")


def made(text: str, message: str = "torch.tanh(x_i * x_j)") -> Message:
    text = text.replace("SPREAD", "index.unsqueeze(1).expand_as(inputs)").replace(
        "ZEROS", "inputs.new_zeros(dim_size, 12)").replace(
        "LIKE", "device=inputs.device, dtype=inputs.dtype")
    body = "\n".join("    " + line for line in text.replace("\\n", "\n").split("\n"))
    names = dict(torch=torch, F=F)
    arguments = ", ".join(one for one in ("x_i", "x_j") if one in message)
    exec(f"def aggregate(self, inputs, index, dim_size):\n{body}\n"
         f"def message(self, {arguments}):\n    return {message}", names)
    # PyG keeps what it writes for a class by the class's name
    number = hash((text, message)) % 10 ** 9
    return type(f"Zeros{number}", (Message,), dict(
        aggregate=names["aggregate"], message=names["message"]))()


@pytest.mark.long
@pytest.mark.parametrize("text", TAKEN)
def test_values_and_gradients(kernels, text):
    compare(kernels, made(text), graphs.features(), graphs.square())
    compare(kernels, made(text), (graphs.features(), graphs.features(M)), graphs.bipartite(),
            None, (N, M), positions=("x", "edge_index", "edge_attr", "size"))


@pytest.mark.parametrize("text", TAKEN[:8])
def test_plain_sums_by_torch_operations(route, text):
    compare(route, made(text, "x_j"), graphs.features(), graphs.square())


@pytest.mark.parametrize("text", NATIVE)
def test_native(kernels, text):
    layer, given = made(text), (graphs.features(), graphs.square())
    try:
        layer(*given)
    except (RuntimeError, AttributeError) as error:  # the host's own error
        layer = layer.to(kernels.device)
        with kernels.on(on_fallback="native"), pytest.raises(type(error)):
            layer(*(one.to(kernels.device) for one in given))
    else:
        both(kernels, layer, *given, on_fallback="native")
        assert routes(layer) == {"native": 1}


class Heads(Message):
    """Two heads; how they are reduced may change."""

    def __init__(self):
        super().__init__(node_dim=0)
        self.lin, self.how, self.scale = nn.Linear(WIDTH, 12), "sum", 1.0

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, 6)).flatten(1)

    def message(self, x_i, x_j):
        return torch.tanh(x_i * x_j)

    def aggregate(self, inputs, index, dim_size):
        out = torch.zeros(dim_size, 2, 6, dtype=inputs.dtype, device=inputs.device)
        rows = index.view(-1, 1, 1).expand_as(inputs)
        out.scatter_reduce_(0, rows, inputs, self.how, include_self=False)
        return out * self.scale


@pytest.mark.long
def test_heads_and_what_changes_between_calls(kernels):
    layer, given = Heads(), (graphs.features(), graphs.square())
    compare(kernels, layer, *given)
    each_seen(kernels, layer, *given, changes=(
        lambda: setattr(layer, "how", "mean"), lambda: setattr(layer, "scale", 0.5),
        lambda: setattr(layer, "how", "amin"), lambda: setattr(layer, "how", "prod")),
        taken="native")


class Default(Heads):
    def aggregate(self, inputs, index, dim_size):
        return torch.zeros(dim_size, 2, 6).to(inputs.device).index_add(0, index, inputs)


def test_another_default_dtype(kernels):
    """Zeros are of it; the host refuses to add other rows to them."""
    layer, given = Default().to(kernels.device), [one.to(kernels.device) for one in (
        graphs.features(), graphs.square())]
    before = torch.get_default_dtype()
    gnnaccel.reset_stats()
    with kernels.on(on_fallback="native"):
        layer(*given)
        assert routes(layer) == {"cuda": 1}
        try:
            torch.set_default_dtype(torch.float64)
            with pytest.raises(RuntimeError):
                layer(*given)
        finally:
            torch.set_default_dtype(before)


def test_a_function_that_is_replaced(kernels, monkeypatch):
    each_seen(kernels, made(TAKEN[0]), graphs.features(), graphs.square(), changes=(
        lambda: monkeypatch.setattr(torch, "zeros", lambda *size, **more: torch.full(
            size, 3.0, **more)),), taken="native")
    before = torch.Tensor.index_add_
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda self, dim, index, rows: before(
        self, dim, index, 2 * rows))
    layer = made(TAKEN[0] + " * 1")
    both(kernels, layer, graphs.features(), graphs.square(), on_fallback="native")
    assert routes(layer) == {"native": 1}
