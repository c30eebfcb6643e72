"""The examples on mini-batches: both ways of each run to the end and agree; the sampler samples."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import molecules
import sage_sampling


def both(found: dict, layer: str) -> None:
    """No dropout, so both ways see the same batches and differ by rounding alone."""
    assert abs(found["native"]["accuracy"] - found["gnnaccel"]["accuracy"]) <= 0.05
    assert sum(found["decisions"][layer]["routes"].values()) == found["decisions"][layer][
        "calls"] > 0


@pytest.mark.parametrize("layer, host",
                         (("gin", "GINConv"), ("gine", "GINEConv"), ("gatv2", "GATv2Conv")))
def test_molecules(layer, host, capsys):
    small = ["--molecules", "40", "--epochs", "1", "--hidden", "8", "--batch", "16", "--device",
             "cpu"]
    found = molecules.main([*small, "--layer", layer])
    both(found, host)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("native") and lines[2].startswith("gnnaccel") and lines[
        3].startswith(host)


def test_molecules_are_simple_graphs_with_both_labels():
    torch.manual_seed(0)
    found = [molecules.molecule() for _ in range(50)]
    assert {int(one.y) for one in found} == {0, 1}
    for one in found:
        pairs = set(map(tuple, one.edge_index.T.tolist()))
        assert len(pairs) == one.edge_index.shape[1] and {(b, a) for a, b in pairs} == pairs and all(a != b for a, b in pairs)
        assert torch.equal(*one.edge_attr.view(2, -1)) and one.edge_index.max() < len(one.x)


def test_sampled_sage(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "graph.npz", edge_index=random.integers(0, 90, (2, 400)),
             x=random.normal(size=(90, 5)), y=random.integers(0, 3, 90))
    both(sage_sampling.main(["--data", str(tmp_path / "graph.npz"), "--hidden", "8", "--batch",
                             "16", "--fanout", "3", "--device", "cpu"]), "SAGEConv")


def test_the_sampler_takes_edges_of_the_graph_up_to_its_fanout():
    torch.manual_seed(0)
    edge_index = torch.randint(0, 30, (2, 120))
    edge_index[1, edge_index[1] % 5 == 0] += 1  # some nodes that no edge enters
    edges = set(map(tuple, edge_index.T.tolist()))
    sampler = sage_sampling.Neighbours(edge_index, 30, fanout=3, hops=2)
    seeds = torch.tensor([29, 5, 7])
    nodes, sampled = sampler.sample(seeds)
    assert nodes[:3].tolist() == [29, 5, 7] and len(nodes.unique()) == len(nodes)
    assert {(int(nodes[a]), int(nodes[b])) for a, b in sampled.T} <= edges
    assert torch.bincount(sampled[1]).max() <= 3 and 1 not in sampled[1]  # nothing enters node 5
    whole = sage_sampling.Neighbours(edge_index, 30, fanout=400, hops=1)
    nodes, sampled = whole.sample(seeds)
    assert sampled.shape[1] == int(torch.isin(edge_index[1], seeds).sum())
