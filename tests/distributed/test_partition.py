"""Cutting a graph, writing its parts, and reading them back."""
from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

import gnnaccel.distributed as distributed
from gnnaccel.dispatch.distributed import building, cutting, storage
from gnnaccel.errors import GraphError, HostLimitError, PartitionError
from tests.distributed import graphs

PARTS = [1, 2, 4]


def parts_of(folder, count):
    return [distributed.load_part(folder, rank) for rank in range(count)]


def edges_of(part, relation=None):
    """Each edge's ends, in the numbers of the whole graph, by its number there."""
    relation = relation or next(iter(part.edges))
    source, target = part.edges[relation]
    known = torch.cat([part.rows[relation[0]].own, part.rows[relation[0]].halo])
    ends = torch.stack([known[source], part.rows[relation[2]].own[target]])
    return dict(zip(part.edge_ids[relation].tolist(), ends.T.tolist()))


@pytest.mark.parametrize("count", PARTS)
@pytest.mark.parametrize("way", ["edges", "random", "ugly"])
def test_every_node_and_edge_is_in_one_part(tmp_path, way, count):
    data = graphs.homogeneous()
    parts = parts_of(graphs.cut(data, count, tmp_path)[way], count)
    own = torch.cat([part.own for part in parts])
    assert sorted(own.tolist()) == list(range(data.num_nodes))
    found = {}
    for part in parts:
        assert part.data.num_nodes == len(part.own) and found.keys().isdisjoint(edges_of(part))
        found.update(edges_of(part))
        for name in ("x", "y", "train_mask"):
            assert torch.equal(part.data[name], data[name][part.own])
        for name in ("edge_weight", "edge_attr", "edge_type"):
            assert torch.equal(part.data[name], data[name][part.edge_ids["node", "to", "node"]])
    assert found == dict(enumerate(data.edge_index.T.tolist()))


@pytest.mark.parametrize("way", ["edges", "random", "ugly"])
def test_types_are_cut_each(tmp_path, way):
    data = graphs.heterogeneous()
    parts = parts_of(graphs.cut(data, 4, tmp_path)[way], 4)
    for kind in data.node_types:
        own = torch.cat([part.rows[kind].own for part in parts])
        assert sorted(own.tolist()) == list(range(data[kind].num_nodes))
        assert all(torch.equal(part.data[kind].x, data[kind].x[part.rows[kind].own])
                   for part in parts)
    for relation in data.edge_types:
        found = {}
        for part in parts:
            assert part.data[relation].edge_index is part.edges[relation]
            found.update(edges_of(part, relation))
        assert found == dict(enumerate(data[relation].edge_index.T.tolist()))


@pytest.mark.parametrize("way", ["random", "ugly"])
def test_the_plan_sends_what_is_needed_once(tmp_path, way):
    data = graphs.heterogeneous()
    parts = parts_of(graphs.cut(data, 4, tmp_path)[way], 4)
    for kind in data.node_types:
        for part in parts:
            rows, came = part.rows[kind], []
            sources = [edges[0] for relation, edges in part.edges.items() if relation[0] == kind]
            assert set(torch.cat(sources).tolist()) >= set(range(len(rows.own), rows.extended))
            for other in parts:
                theirs = other.rows[kind]
                sent = theirs.send_rows.split(theirs.send)[part.rank]
                assert len(sent.unique()) == len(sent) == rows.receive[other.rank]
                came.append(theirs.own[sent])
            assert torch.equal(torch.cat(came), rows.halo)
            assert rows.receive[part.rank] == rows.send[part.rank] == 0


def test_ranges_are_balanced_by_edges():
    degrees = np.array([90, 1, 1, 1, 1, 1, 1, 30, 30, 30])
    owner = cutting.by_edges(degrees, 2)
    assert (np.diff(owner) >= 0).all() and degrees[owner == 0].sum() == 93
    assert cutting.by_edges(np.zeros(8, int), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cutting.by_edges(np.array([5]), 4).tolist() == [2]  # all other parts are empty
    assert cutting.by_edges(np.zeros(0, int), 3).tolist() == []


def test_chunks_and_mapped_files_make_the_same_parts(tmp_path):
    data = graphs.homogeneous()
    files = {}
    for name in ("edge_index", "x", "y", "edge_weight"):
        files[name] = tmp_path / f"{name}.npy"
        np.save(files[name], data[name].numpy())
    mapped = distributed.partition_arrays(
        files["edge_index"], data.num_nodes, 3, out=tmp_path / "mapped", chunk=7,
        node_arrays={"x": files["x"], "y": str(files["y"])},
        edge_arrays={"edge_weight": files["edge_weight"]})
    whole = distributed.partition(data, 3, out=tmp_path / "whole")
    for mine, right in zip(parts_of(mapped, 3), parts_of(whole, 3)):
        for name in ("edge_index", "x", "y", "edge_weight"):
            assert torch.equal(mine.data[name], right.data[name])
        assert torch.equal(mine.own, right.own)


def test_no_more_than_a_chunk_of_edges_is_read_at_once(tmp_path):
    """These arrays hand out slices only, and no long ones."""
    edges = np.stack([np.arange(400) % 37, np.arange(400) % 41])

    class Sliced:
        def __init__(self, array):
            self._array = array

        def __len__(self):
            return len(self._array)

        def __getitem__(self, at):
            assert isinstance(at, slice) and at.stop - at.start <= 64
            return self._array[at]

    graph = building.Graph({building.NODE: 41}, {building.EDGE: tuple(map(Sliced, edges))})
    owner = building.owners(graph, 2, None, 64)
    building.write(graph, owner, 2, tmp_path / "out", "edges", 64)
    found = {}
    for part in parts_of(tmp_path / "out", 2):
        found.update(edges_of(part))
    assert found == dict(enumerate(edges.T.tolist()))


def test_other_dtypes_and_attributes_of_the_graph_come_back(tmp_path):
    data = graphs.homogeneous()
    data.x = data.x.bfloat16()
    data.classes, data.name, data.whole = 7, "small", torch.tensor([1.5, 2.5])
    data.number, data.empty = torch.tensor(3.0), torch.zeros(0, 4)
    part = distributed.load_part(distributed.partition(data, 2, out=tmp_path / "out"), 1)
    assert torch.equal(part.data.x, data.x[part.own]) and part.data.x.dtype == torch.bfloat16
    assert (part.data.classes, part.data.name) == (7, "small")
    for name in ("whole", "number", "empty"):
        assert torch.equal(part.data[name], data[name]) and part.data[name].shape == data[name].shape


def test_sizes(tmp_path):
    folder = distributed.partition(graphs.heterogeneous(), 2, out=tmp_path / "out")
    found = distributed.sizes(folder)
    assert found["parts"] == 2 and found["nodes"] == {"paper": 18, "author": 9}
    assert found["edges"]["paper", "by", "author"] == 25 and found["method"] == "edges"


@pytest.mark.skipif(not cutting.has_pymetis(), reason="pymetis is not installed")
def test_metis_cuts_few_edges(tmp_path):
    from torch_geometric.data import Data

    g = graphs.generator(0)
    inside = torch.randint(0, 30, (2, 400), generator=g)
    edges = torch.cat([inside, inside + 30, torch.tensor([[3], [40]])], 1)
    order = torch.randperm(60, generator=g)  # ranges would cut half of them
    folder = distributed.partition(Data(edge_index=order[edges], num_nodes=60), 2, "metis",
                                   out=tmp_path / "out")
    assert sum(len(part.rows["node"].halo) for part in parts_of(folder, 2)) <= 2


def test_metis_that_is_not_there(tmp_path, monkeypatch):
    from torch_geometric import typing

    monkeypatch.setattr(cutting, "has_pymetis", lambda: False)
    monkeypatch.setattr(typing, "WITH_METIS", False, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HostLimitError, match="pip install pymetis"):
        distributed.partition(graphs.homogeneous(), 2, "metis", out=tmp_path / "out")


def test_neighbours_for_metis_are_symmetric_and_without_loops():
    pointers, neighbours = cutting.symmetric(np.array([[0, 0, 2, 1], [1, 1, 2, 3]]), 5)
    assert pointers.tolist() == [0, 1, 3, 3, 4, 4] and neighbours.tolist() == [1, 0, 3, 1]


@pytest.mark.parametrize("change, error, message", [
    (lambda d: dict(parts=0), PartitionError, "parts=0"),
    (lambda d: dict(method="halves"), PartitionError, "method='halves'"),
    (lambda d: dict(method=torch.zeros(3, dtype=torch.long)), PartitionError, "one integer for"),
    (lambda d: dict(method=torch.full((26,), 2)), PartitionError, "names parts from 2 to 2"),
    (lambda d: dict(method=torch.zeros(26)), PartitionError, "float32"),
    (lambda d: d.update(dict(odd=object())), PartitionError, "odd is a object"),
    (lambda d: d.edge_index.__setitem__((0, 0), 99), GraphError, "names node 99 of 26"),
])
def test_what_cannot_be_cut(tmp_path, change, error, message):
    data = graphs.homogeneous()
    options = change(data)
    options = options if type(options) is dict else {}
    with pytest.raises(error, match=message):
        distributed.partition(data, **{"parts": 2, **options}, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []  # nothing half-written is left


def test_types_that_cannot_be_cut(tmp_path):
    data = graphs.heterogeneous()
    with pytest.raises(PartitionError, match="dictionary of assignments by type"):
        distributed.partition(data, 2, torch.zeros(18), out=tmp_path / "out")
    with pytest.raises(PartitionError, match="lacks node type 'author'"):
        distributed.partition(data, 2, {"paper": torch.zeros(18, dtype=torch.long)},
                              out=tmp_path / "out")
    data["author"].note = "text"
    with pytest.raises(PartitionError, match="note of author is a str"):
        distributed.partition(data, 2, out=tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    before = (folder / storage.MANIFEST).read_bytes()
    with pytest.raises(PartitionError, match="exists already"):
        distributed.partition(graphs.homogeneous(1), 2, out=folder)
    assert (folder / storage.MANIFEST).read_bytes() == before


def test_an_interrupted_partition_leaves_no_folder(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_folder_is_named(tmp_path):
    (tmp_path / "out.partial-123" / "part-0").mkdir(parents=True)
    with pytest.raises(PartitionError, match=r"out\.partial-123 is half-written"):
        distributed.load_part(tmp_path / "out", 0)
    with pytest.raises(PartitionError, match="it is half-written, or no partition"):
        distributed.load_part(tmp_path / "out.partial-123", 0)


def a_file(folder):
    return max((path for path in (folder / "part-1").iterdir() if path.name != storage.MANIFEST),
               key=lambda path: path.stat().st_size)


def cut_off(folder):
    path = a_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def flipped(folder):
    path = a_file(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def another_format(folder):
    path = folder / storage.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def another_part(folder):
    path = folder / "part-1" / storage.MANIFEST
    path.write_bytes((folder / "part-0" / storage.MANIFEST).read_bytes())


@pytest.mark.parametrize("harm, message", [
    (cut_off, "it is cut off or was changed"), (flipped, "its SHA-256 is another"),
    (lambda folder: a_file(folder).unlink(), "is missing"),
    (lambda folder: (folder / "part-1" / storage.MANIFEST).unlink(), "is missing"),
    (another_format, "is of format 99"), (another_part, "folders are mixed up"),
    (lambda folder: (folder / storage.MANIFEST).write_text('{"form'), "is no JSON"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_folder_that_was_changed_is_refused(tmp_path, harm, message):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    harm(folder)
    with pytest.raises(PartitionError, match=message):
        distributed.load_part(folder, 1)


def test_digests_need_not_be_read(tmp_path):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    flipped(folder)
    assert distributed.load_part(folder, 1, verify=False).rank == 1


def test_a_part_that_does_not_exist(tmp_path):
    folder = distributed.partition(graphs.homogeneous(), 2, out=tmp_path / "out")
    with pytest.raises(PartitionError, match="has 2 parts, numbered from 0; there is no part 2"):
        distributed.load_part(folder, 2)
    with pytest.raises(PartitionError, match="needs a rank"):
        distributed.load_part(folder)
