"""How the stand-ins are asked for, what is said of names that are not there, and what PyG sees.
Each in a process of its own."""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import gnnaccel
from gnnaccel import env
from gnnaccel.adapters.standins import finder, from_environment, modules

PACKAGES = tuple(modules.PACKAGES)


@pytest.fixture
def run():
    def run(code, *path, **variables):
        given = {k: v for k, v in os.environ.items() if not k.startswith("GNNACCEL")}
        given["PYTHONPATH"] = os.pathsep.join([*map(str, path), *sys.path])
        done = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c",
                               textwrap.dedent(code)], capture_output=True, text=True,
                              env={**given, **variables})
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]
    return run


@pytest.mark.long
def test_asked_for_by_a_call(run):
    assert run("""
        import importlib.util, sys
        import gnnaccel
        print(importlib.util.find_spec("torch_scatter"))
        print(gnnaccel.standins("torch_scatter"), "torch" in sys.modules)
        print(gnnaccel.standins("torch_scatter", "torch_cluster"))
        print(importlib.util.find_spec("torch_sparse"))
        from torch_scatter import scatter_mean
        from torch_scatter.composite.softmax import scatter_softmax
        import torch_scatter.scatter
        print(torch_scatter.scatter.__name__, torch_scatter.__version__)
        print("torch_scatter.segment_csr" in sys.modules, torch_scatter.__doc__)
    """) == ["None", "('torch_scatter',) False", "('torch_scatter', 'torch_cluster')", "None",
             "scatter 2.1.2", "True gnnaccel's stand-in for torch_scatter 2.1.2"]


@pytest.mark.long
def test_asked_for_by_the_environment(run):
    code = """
        import sys, gnnaccel
        print("torch" in sys.modules, *sorted(gnnaccel.adapters.standins.finder.active()))
        import torch_sparse
        print(torch_sparse.SparseTensor.__module__)
    """
    assert run(code, GNNACCEL_STANDINS=" torch_sparse, torch_scatter") == [
        "False torch_scatter torch_sparse", "torch_sparse.tensor"]
    assert env.standins({"GNNACCEL_STANDINS": "a, b,"}) == ("a", "b") and env.standins({}) == ()
    from_environment(())
    assert not finder.active()


@pytest.mark.parametrize("call", [lambda: gnnaccel.standins("torch_scater"),
                                  lambda: from_environment(("torch_scater",))])
def test_unknown_packages(call):
    with pytest.raises(ValueError, match="no stand-in for 'torch_scater'; use one of torch_scatter, "
                       "torch_sparse, torch_cluster, dgl.sparse. Did you mean 'torch_scatter'"):
        call()


def test_a_real_package_is_never_covered(run, tmp_path):
    (tmp_path / "torch_scatter").mkdir()
    (tmp_path / "torch_scatter" / "__init__.py").write_text("real = True\n")
    code = """
        import importlib.util, gnnaccel
        print(gnnaccel.standins())
        import torch_scatter
        print(torch_scatter.real, importlib.util.find_spec("torch_cluster").origin)
    """
    assert run(code, tmp_path) == ["('torch_sparse', 'torch_cluster')", "True stand-in by gnnaccel"]
    late = f"""
        import sys, gnnaccel
        print(gnnaccel.standins("torch_scatter"))
        sys.path.insert(0, {str(tmp_path)!r})
        import torch_scatter
        print(torch_scatter.real)
        try:
            import torch_scatter.scatter
        except ModuleNotFoundError as error:
            print(error)
    """
    assert run(late) == ["('torch_scatter',)", "True", "No module named 'torch_scatter.scatter'"]


def test_a_module_made_by_hand_counts_as_real(run):
    assert run("""
        import sys, types
        sys.modules["torch_scatter"] = types.ModuleType("torch_scatter")
        import gnnaccel
        print(gnnaccel.standins("torch_scatter"))
    """) == ["()"]


@pytest.mark.parametrize("code, kind, text", [
    ("from torch_scatter import nope", ImportError,
     "gnnaccel's stand-in for torch_scatter has no nope; install torch-scatter itself"),
    ("import torch_scatter.nope", ImportError, "stand-in for torch_scatter has no nope"),
    ("import torch_scatter; torch_scatter.nope", AttributeError,
     "stand-in for torch_scatter has no nope"),
    ("from torch_sparse.tensor import nope", ImportError, "nope"),
    ("from torch_sparse import partition", ImportError,
     "has no partition; install pyg-lib and use torch_geometric.loader.ClusterData"),
    ("from torch_cluster import neighbor_sampler", ImportError, "NeighborLoader"),
])
def test_names_that_are_not_there(stood_in, code, kind, text):
    with pytest.raises(kind, match=text):
        exec(code, {})
    scope: dict = {}
    exec("import torch_scatter", scope)
    assert not hasattr(scope["torch_scatter"], "nope")


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_and_submodules(stood_in, package):
    scope: dict = {}
    exec(f"import {package}\nfrom {package} import *", scope)
    for submodule, (_, names) in modules.PACKAGES[package].modules.items():
        inner: dict = {}
        exec(f"from {package}.{submodule} import *", inner)
        assert set(names.split()) <= set(inner)
        if submodule != "utils":
            for name in names.split():
                assert scope[name] is inner[name] is getattr(scope[package], name)


# --- what PyG sees --------------------------------------------------------------------------------

FIRST = {"before": "import torch_geometric\n", "after": ""}
SEEN = """
import torch, torch_scatter, torch_sparse, torch_cluster
import torch_geometric.typing as seen
print(seen.WITH_TORCH_SCATTER, seen.WITH_TORCH_SPARSE,
      seen.SparseTensor is torch_sparse.SparseTensor)
import torch_scatter as again, sys
print(again is torch_scatter, sys.modules["torch_sparse"] is torch_sparse)
from torch_geometric.nn import GATConv, GCNConv
adj = torch_sparse.SparseTensor(row=torch.tensor([0, 2]), col=torch.tensor([1, 0]),
                                sparse_sizes=(3, 3))
x = torch.eye(3)
for layer in (GCNConv(3, 2), GATConv(3, 2)):
    try:
        out = layer(x, adj)
    except ValueError as error:
        print(error)
        out = layer(x, adj.to_torch_sparse_csr_tensor())
    row, col, _ = adj.coo()
    print(torch.allclose(out, layer(x, torch.stack([col, row])), atol=1e-6))
"""


@pytest.mark.long
@pytest.mark.parametrize("order", [pytest.param("before", marks=pytest.mark.long), "after"])
def test_pyg_goes_on_without_them(run, order):
    pytest.importorskip("torch_geometric")
    said = run(FIRST[order] + "import gnnaccel\ngnnaccel.standins()\n" + SEEN)
    assert said[:2] == ["False False False", "True True"]
    assert said[3] == said[5] == "True" and said[2] == said[4]
    assert "which PyG does not know. Pass edge_index.to_torch_sparse_csr_tensor()" in said[2]
    assert "GNNACCEL_STANDINS=torch_sparse,pyg" in said[2]


@pytest.mark.long
@pytest.mark.parametrize("way", ["call", pytest.param("variable", marks=pytest.mark.long)])
def test_pyg_takes_sparse_tensors_where_that_is_asked_for(run, way):
    pytest.importorskip("torch_geometric")
    code = SEEN + """
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import ToSparseTensor
data = ToSparseTensor()(Data(x=x, edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
print(type(data.adj_t) is torch_sparse.SparseTensor)
print(Batch.from_data_list([data, data]).adj_t.sizes())
print(ToSparseTensor(layout=torch.sparse_csr)(Data(x=x, edge_index=torch.tensor([[0], [1]]),
                                                   num_nodes=3)).adj_t.layout)
"""
    expected = ["False False True", "True True", "True", "True", "True", "[6, 6]",
                "torch.sparse_csr"]
    if way == "call":
        assert run("import gnnaccel\ngnnaccel.standins(pyg=True)\n" + code) == expected
    else:
        variable = ",".join(("pyg", *PACKAGES))
        assert run("import gnnaccel\n" + code, GNNACCEL_STANDINS=variable) == expected


@pytest.mark.long
def test_asking_too_late(run):
    pytest.importorskip("torch_geometric")
    assert run("""
        import torch_geometric, warnings
        import gnnaccel
        try:
            gnnaccel.standins("torch_sparse", pyg=True)
        except gnnaccel.errors.HostLimitError as error:
            print(error)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            gnnaccel.adapters.standins.from_environment(("torch_sparse", "pyg"))
        print(seen[0].message)
        import torch_sparse
    """)[0].startswith("torch_geometric was imported before")


@pytest.mark.long
def test_layers_are_still_compiled_by_torchscript(run):
    pytest.importorskip("torch_geometric")
    assert run("""
        import gnnaccel
        gnnaccel.standins()
        import torch, torch_sparse
        from torch_geometric.nn import SAGEConv
        layer, x, edge_index = SAGEConv(3, 2), torch.eye(3), torch.tensor([[0, 1], [1, 2]])
        print(torch.equal(torch.jit.script(layer)(x, edge_index), layer(x, edge_index)))
    """) == ["True"]


@pytest.mark.long
def test_layers_of_enabled_pyg(run):
    pytest.importorskip("torch_geometric")
    assert run("""
        import gnnaccel
        gnnaccel.standins("torch_sparse", pyg=True)
        gnnaccel.enable(when="supported")
        import torch
        from torch_sparse import SparseTensor
        from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv
        edge_index, x = torch.randint(0, 9, (2, 30)).unique(dim=1), torch.randn(9, 4)
        adj = SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=(9, 9))
        for layer in (GATConv(4, 4), GCNConv(4, 4), GINConv(torch.nn.Linear(4, 4)), SAGEConv(4, 4)):
            print(torch.allclose(layer(x, adj), layer(x, edge_index), atol=1e-5))
    """) == ["True"] * 4
