"""The contract of adapters: every layer's module keeps it, and misspelt names are refused."""
from __future__ import annotations

import importlib
import types

import pytest

pytest.importorskip("torch")

from gnnaccel.adapters import contract


def names() -> list[str]:
    from gnnaccel.adapters import dgl, pyg

    of_pyg = {module for module, _ in pyg.LAYERS.values()} | {"fx.to_hetero", "fx.basis"}
    return sorted([f"pyg.{name}" for name in of_pyg]
                  + [f"dgl.{name}" for name in set(dgl.LAYERS.values())])


@pytest.mark.parametrize("name", names())
def test_every_module_keeps_it(name):
    host = "torch_geometric" if name.startswith("pyg") else "dgl"
    pytest.importorskip(host)
    module = importlib.import_module(f"gnnaccel.adapters.{name}")
    found = contract.read(module)
    assert found.state is module.state and found.run is module.run
    if found.keep is not None:
        assert found.again is not None  # what is kept is for that
    if found.LINEAR:
        assert found.WATCHED is not None


def test_what_is_missing_or_misspelt():
    module = types.ModuleType("layer")
    with pytest.raises(AttributeError, match="layer lacks state"):
        contract.read(module)
    module.state = module.run = print
    assert contract.read(module).FIELDS is None and contract.read(module).keep is None
    module.FIELD = ()
    with pytest.raises(AttributeError, match="did you mean FIELDS"):
        contract.read(module)


@pytest.mark.parametrize("host, package", [("torch_geometric", "gnnaccel.adapters.pyg"),
                                           ("dgl", "gnnaccel.adapters.dgl"),
                                           ("torch", "gnnaccel.adapters.autograd")])
def test_every_hosts_package_keeps_its_own(host, package):
    pytest.importorskip(host)
    found, module = contract.read_host(package), importlib.import_module(package)
    assert found.install is module.install and found.LAYERS == vars(module).get("LAYERS", {})
    other = types.SimpleNamespace()  # no layer of anybody's
    assert found.adapter_of(other) is None and found.storable(other) is None
    assert not found.linear_maps(other) if host == "torch" else True
    assert all(callable(function) for function in found.redone())
