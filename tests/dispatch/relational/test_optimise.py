"""Which ordering is taken: what the counts say, on both sides of where they change their mind."""
from __future__ import annotations

import pytest

from gnnaccel.dispatch.plan import cost
from gnnaccel.dispatch.policy.config import PASSES
from gnnaccel.dispatch.relational.counting import Count, count, count_on_gpu
from gnnaccel.dispatch.relational.gather import RelationStatistics
from gnnaccel.dispatch.relational.optimise import optimise
from gnnaccel.dispatch.relational.passes import orderings
from gnnaccel.dispatch.relational.request import shapes_of
from tests.relational_cases import STATEMENTS, statement, tensors, typed

RGCN = dict(x=(64,), weight=(64, 64))
BASES = dict(x=(64,), comp=(4,), bases=(4, 64, 64))
TABLES = dict(ids=(), comp=(4,), bases=(4, 1000, 64))


def graph(pairs_src: int, pairs_dst: int, edges: int = 1_000_000, relations: int = 50,
          nodes: int = 100_000) -> RelationStatistics:
    return RelationStatistics(nodes, nodes, edges, relations, pairs_src, pairs_dst)


def taken(name: str, shapes: dict, stats: RelationStatistics, device: str = "cuda",
          **options) -> str:
    return optimise(statement(name), shapes, stats, device, **options).taken.name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["rgcn sum", "rgcn mean"])
def test_the_map_goes_where_there_are_fewer_pairs(name, device):
    assert taken(name, RGCN, graph(900_000, 50_000), device) == "aggregate_first"
    assert taken(name, RGCN, graph(50_000, 900_000), device) == "as stated"


@pytest.mark.parametrize("name", ["rgcn sum", "rgcn mean"])
def test_in_training_the_map_goes_where_there_are_fewer_pairs(name):
    """Forward, sums before the map have to be written and read once more; backward, that is so of
    gradients after it."""
    for stats, forward, training in ((graph(300_000, 200_000), "as stated", "aggregate_first"),
                                     (graph(200_000, 300_000), "as stated", "as stated"),
                                     (graph(900_000, 50_000), "aggregate_first",
                                      "aggregate_first")):
        assert taken(name, RGCN,
                     stats) == forward and taken(name, RGCN, stats, train=True) == training
        assert taken(name, RGCN, stats, "cpu") == taken(name, RGCN, stats, "cpu", train=True)


def test_where_launches_are_all_that_counts():
    """Of two folds both save bytes, but a matrix by relation more costs seven launches."""
    shapes, tiny = dict(x=(64,), weight=(64, 64), q=(64, 2),
                        k=(64, 2)), graph(3_000, 3_000, 9_000, nodes=1_000, relations=20)
    found = optimise(statement("rgat"), shapes, tiny, "cuda", train=True)
    assert found.taken.name == "as stated" and (found.taken.count.launches,
                                                found.taken.back.launches) == (6, 16)
    assert found.taken.count.moved + found.taken.back.moved > min(o.count.moved + o.back.moved
                                                                  for o in found.orderings)
    assert "fold_chain" in taken("rgat", shapes, graph(300_000, 300_000), train=True)


def test_without_compaction_the_sources_are_the_edges():
    """What the statistics of a view without compaction say: as many source pairs as edges."""
    assert taken("rgcn mean", RGCN, graph(150_000, 500_000)) == "as stated"
    assert taken("rgcn mean", RGCN, graph(1_000_000, 500_000)) == "aggregate_first"


def test_a_narrow_result_is_gathered_rather_than_a_wide_input():
    stats = graph(300_000, 300_000)
    assert taken("rgcn mean", dict(x=(512,), weight=(512, 8)), stats) == "as stated"
    assert taken("rgcn mean", dict(x=(8,), weight=(8, 512)), stats) == "aggregate_first"


def test_bases():
    """A matrix for each of many relations, or one product for each basis."""
    few, many = graph(900_000, 400_000, relations=3), graph(900_000, 400_000, relations=100_000)
    assert taken("rgcn mean bases", BASES, many) == "aggregate_first + per_basis"
    assert taken("rgcn mean bases", dict(x=(64,), comp=(30,), bases=(30, 64, 64)),
                 few) == "aggregate_first"
    assert taken("rgcn mean bases", BASES, graph(50_000, 900_000, relations=3)) == "as stated"


def test_tables():
    """All of each relation's table, or the rows that some edge wants."""
    assert taken("embedding mean bases", TABLES,
                 graph(900_000, 900_000, relations=3)) == "table_first"
    assert taken("embedding mean bases", TABLES,
                 graph(2_000, 2_000, 10_000, relations=2_000)) == "as stated"


def test_folding_pays_where_rows_are_wider_than_heads():
    shapes = dict(x=(64,), weight=(64, 64), q=(64, 2), k=(64, 2))
    assert "fold_chain" in taken("rgat", shapes, graph(300_000, 300_000))
    narrow = dict(x=(64,), weight=(64, 2), q=(2, 2), k=(2, 2))
    assert taken("rgat", narrow, graph(300, 300, 1_000, relations=100_000)) == "as stated"


def test_the_prior_goes_into_the_map_of_few_relations():
    shapes = dict(keys=(64,), values=(64,), queries=(64,), w_att=(4, 16, 16), w_msg=(4, 16, 16),
                  p=(4,))
    assert taken("hgt", shapes, graph(300_000, 300_000)) == "prior_into_map"


@pytest.mark.parametrize("name", STATEMENTS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_orderings_cheapest_first(name, device):
    shapes = dict(shapes_of(statement(name), tensors(name, typed())))
    found = optimise(statement(name), shapes, graph(300_000, 200_000), device)
    assert {o.name for o in found.orderings} == {how for how, _ in orderings(statement(name))}
    assert len(found.orderings) == len(orderings(statement(name)))
    seconds = [o.seconds for o in found.orderings]
    assert seconds == sorted(seconds) and all(o.seconds == o.count.seconds(device) > 0
                                              for o in found.orderings)
    back = optimise(statement(name), shapes, graph(300_000, 200_000), device, train=True)
    for o in back.orderings:
        assert o.seconds == (o.count
                             + o.back).seconds(device) and bool(o.back.moved) is (device == "cuda")
    assert found.program is found.taken.program is found.orderings[
        0].program and found.stated is statement(name)


@pytest.mark.parametrize("passes", [(), ("compaction",)])
def test_without_reordering_the_program_is_as_stated(passes):
    stats = graph(900_000, 50_000)
    found = optimise(statement("rgcn mean"), RGCN, stats, "cuda", passes)
    assert [o.name for o in found.orderings] == ["as stated"]
    for others in (PASSES, ("reordering",)):
        assert taken("rgcn mean", RGCN, stats, passes=others) == "aggregate_first"


def test_rates_decide_between_bytes_and_operations(monkeypatch):
    """The same counts, with operations and then with bytes for nothing."""
    stats = graph(1_000_000, 990_000)  # aggregating first saves a few operations and moves more
    for rates, expected in ((dict(bandwidth=1e30, flops=1.0), "aggregate_first"),
                            (dict(bandwidth=1.0, flops=1e30), "as stated")):
        constants = {**cost.constants(),
                     "relational": {"cuda": {"orderings": {**rates, "launch": 0.0}}}}
        monkeypatch.setattr(cost, "constants", lambda constants=constants: constants)
        assert taken("rgcn sum", RGCN, stats) == expected
        monkeypatch.undo()


def test_what_records_tell():
    stats = graph(900_000, 50_000)
    found = optimise(statement("rgcn mean"), RGCN, stats, "cuda")
    told = found.as_dict()
    assert {k: told[k]
            for k in ("pairs_src", "pairs_dst", "relations", "compaction_src", "compaction_dst",
                      "ordering")} == {
        "pairs_src": 900_000, "pairs_dst": 50_000, "relations": 50, "compaction_src": 0.9,
        "compaction_dst": 0.05,
        "ordering": "aggregate_first"}
    assert [o["name"] for o in told["orderings"]] == ["aggregate_first", "as stated"]
    first = found.taken
    assert told["orderings"][0] == {"name": first.name, "bytes": first.count.moved,
                                    "flops": first.count.flops, "launches": 3, "backward": None,
                                    "estimated_us": first.seconds * 1e6}
    back = optimise(statement("rgcn mean"), RGCN, stats, "cuda", train=True)
    assert back.as_dict()["orderings"][0]["backward"] == {
        "bytes": back.taken.back.moved, "flops": back.taken.back.flops, "launches": 3}
    empty = optimise(statement("rgcn mean"), RGCN, RelationStatistics(5, 5, 0, 3, 0, 0),
                     "cpu").as_dict()
    assert empty["compaction_src"] == empty["compaction_dst"] == 0.0


@pytest.mark.parametrize("device, train", [("cpu", False), ("cuda", False), ("cuda", True)])
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_formula_counts_what_reading_the_ordering_counts(name, device, train):
    shapes = dict(shapes_of(statement(name), tensors(name, typed(9, 7, 40, 3))))
    for stats in (RelationStatistics(0, 0, 0, 0, 0, 0), RelationStatistics(11, 23, 307, 5, 101, 67),
                  graph(300_000, 200_000)):
        for found in optimise(statement(name), shapes, stats, device, train=train).orderings:
            counted = count(found.program, shapes, stats), Count()
            if device == "cuda":
                counted = count_on_gpu(found.program, shapes, stats, train)
            assert (found.count, found.back) == counted


def test_orderings_are_made_once():
    first, second = (optimise(statement("rgcn sum"), RGCN, stats, "cuda")
                     for stats in (graph(900_000, 50_000), graph(10, 10, 20)))
    assert {id(o.program) for o in first.orderings} == {id(o.program) for o in second.orderings}
