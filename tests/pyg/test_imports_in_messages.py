"""Messages and aggregates that import what they need by themselves."""
from __future__ import annotations

import pytest

import gnnaccel
from tests.pyg.generated_calls import arguments, routes
from tests.pyg.generated_layers import Message
from tests.pyg.judge import close, compare


class ImportsSoftmax(Message):
    def message(self, x_i, x_j, index, ptr, size_i):
        import math
        from torch_geometric.utils import softmax as normalised
        from torch.nn import functional
        alpha = normalised(functional.leaky_relu((x_i * x_j).sum(-1)) / math.sqrt(3), index, ptr,
                           size_i)
        return x_j * alpha.unsqueeze(-1)

    def aggregate(self, inputs, index, dim_size=None):
        from torch_geometric.utils import scatter
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="mean")


def test_imports(kernels):
    compare(kernels, ImportsSoftmax(), *arguments(Message)[:2])


def test_what_is_imported_changes(emulated, monkeypatch):
    from torch_geometric import utils

    layer, args = ImportsSoftmax(), arguments(Message)[:2]
    original = utils.softmax
    with emulated.on(on_fallback="native"):
        layer(*args)
        monkeypatch.setattr(utils, "softmax", lambda *given: original(*given) * 2)
        with gnnaccel.disabled():
            expected = layer(*args)
        assert close(layer(*args), expected)
    assert routes(layer) == {"cuda": 1, "native": 1}


class ImportsOthers(Message):
    def message(self, x_i, x_j):
        import random
        return x_j * x_i * random.random()


@pytest.mark.long
def test_imports_of_other_modules_stay_native(emulated):
    import random

    layer, args = ImportsOthers(), arguments(Message)[:2]
    random.seed(3)
    expected = [layer(*args) for _ in range(2)]
    random.seed(3)
    with emulated.on(on_fallback="native"):
        assert all(close(layer(*args), one) for one in expected)
    assert routes(layer) == {"native": 2}
