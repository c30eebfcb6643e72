"""The records' schema and their sinks."""
from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings

import pytest

from gnnaccel.dispatch.observe import records
from gnnaccel.profile import sinks
from gnnaccel.profile.sinks import JsonlSink, LoggerSink, RingSink


def record(**fields):
    return records.new(**{"host": "pyg", "layer": "GATConv", "route": "cuda",
                          "kernel": "gat_forward", **fields})


@pytest.fixture
def subscribed():
    added = []

    def add(sink):
        added.append(sink)
        return records.subscribe(sink)

    yield add
    for sink in added:
        records.unsubscribe(sink)


# --- schema ---------------------------------------------------------------------------------------

def test_new_fills_every_field_and_numbers_grow():
    first, second = record(), record()
    records.validate(first)
    assert set(first) == set(records._FIELDS) == set(records._DEFAULTS)
    assert second["call"] > first["call"] and first["schema"] == 1
    with pytest.raises(TypeError, match="no field kernal"):
        record(kernal="x")


def test_a_full_record_is_valid_and_goes_through_json():
    full = record(direction="backward", forward_call=3, name="convs.0", cost_us=1.5, cache="hit",
                  dtype="bfloat16", out_dtype="float32", autocast="bfloat16", capturing=True,
                  deterministic=True, training=True, grad=True, overhead_us=4,
                  graph={"num_src": 3, "num_dst": 3, "num_edges": 7, "self_loops": True},
                  rejected=[{"candidate": "b", "code": "GA203", "text": "float64",
                             "hint": "use float32"}], passes=PASSES)
    records.validate(full)
    records.validate(json.loads(json.dumps(full)))


PASSES = {"pairs_src": 4, "pairs_dst": 5, "relations": 3, "compaction_src": 0.5,
          "compaction_dst": 1, "ordering": "as stated",
          "orderings": [{"name": "as stated", "bytes": 10, "flops": 20, "estimated_us": 0.5}]}
BAD = {
    "schema": [2, "1", True], "call": ["1", 1.0, True], "time": ["now", None],
    "direction": ["sideways", None],
    "forward_call": ["3"], "host": ["jax", None], "layer": [None, 3], "name": [3],
    "route": ["gpu", None],
    "graph": [{}, {"num_src": 1, "num_dst": 1}, {"num_src": 1, "num_dst": 1, "num_edges": 1.5}, []],
    "kernel": [3],
    "rejected": [None, [{}], [{"candidate": "a", "code": "GA1", "text": None, "hint": ""}], ()],
    "cost_us": ["1", True], "native_us": ["1", True],
    "passes": [3, [], {}, {**PASSES, "pairs_src": None}, {**PASSES, "compaction_src": "half"},
               {**PASSES, "ordering": None}, {**PASSES, "orderings": None},
               {**PASSES, "orderings": [{"name": "as stated"}]}],
    "cache": [None, "maybe"], "dtype": [3], "out_dtype": [3], "autocast": [True],
    "capturing": [None, 1],
    "deterministic": [None], "training": [None], "grad": [None], "storage": [8],
    "kernels": [None, ["additive"], [{"family": "a", "entry": "k", "defines": {"A": 1}}]],
    "overhead_us": ["1"],
}


def test_every_field_has_a_counterexample():
    assert set(BAD) == set(records._FIELDS)


@pytest.mark.parametrize("key, value",
                         [(key, value) for key, values in BAD.items() for value in values])
def test_validate_names_a_wrong_field(key, value):
    with pytest.raises(ValueError, match=f"{key}="):
        records.validate({**record(), key: value})


def test_validate_reports_missing_extra_and_contradictions():
    broken = record()
    del broken["cache"]
    with pytest.raises(ValueError, match="cache is missing; extra is not a field"):
        records.validate({**broken, "extra": 1})
    with pytest.raises(ValueError, match="forward_call is missing on a backward"):
        records.validate(record(direction="backward"))
    with pytest.raises(ValueError, match="forward_call is set on a forward"):
        records.validate(record(forward_call=1))
    with pytest.raises(ValueError, match="kernel is None on route cuda"):
        records.validate(record(kernel=None))
    records.validate(record(route="native", kernel=None))


# --- emit -----------------------------------------------------------------------------------------

def test_listening_follows_subscriptions(subscribed):
    got = []
    assert not records.listening()
    subscribed(got.append)
    subscribed(other := (lambda item: None))
    assert records.listening()
    sink = got.append
    subscribed(sink)
    records.emit(record())
    assert len(got) == 2  # two different bound methods
    assert records.unsubscribe(sink) and not records.unsubscribe(sink) and records.unsubscribe(
        other)


def test_subscribing_twice_is_once(subscribed):
    ring = RingSink(5)
    subscribed(ring)
    subscribed(ring)
    records.emit(record())
    assert len(ring.records()) == 1


def test_a_broken_sink_is_taken_out_with_one_warning(subscribed):
    class Broken:
        def __call__(self, item):
            raise OSError("disk full")

    ring = RingSink(5)
    subscribed(Broken())
    subscribed(ring)
    with pytest.warns(RuntimeWarning,
                      match="Broken failed and gets no more records: OSError: disk full") as caught:
        records.emit(record())
        records.emit(record())
    assert len(caught) == 1 and len(ring.records()) == 2


# --- sinks ----------------------------------------------------------------------------------------

def test_ring_keeps_the_latest():
    ring = RingSink(2)
    for n in range(4):
        ring({"n": n})
    assert ring.records() == [{"n": 2}, {"n": 3}]
    ring.resize(3)
    ring({"n": 4})
    assert [item["n"] for item in ring.records()] == [2, 3, 4]
    ring.resize(1)
    assert ring.records() == [{"n": 4}]
    ring.clear()
    assert ring.records() == []


def test_jsonl_appends_whole_lines_from_many_threads(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"earlier": 1}\n')
    sink = JsonlSink(path)
    threads = [threading.Thread(target=lambda: [sink(record(name="x" * 500)) for _ in range(50)])
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(text) for text in path.read_text().splitlines()]  # flushed before close
    sink.close()
    sink(record())
    assert lines[0] == {"earlier": 1} and len(lines) == 401
    for item in lines[1:]:
        records.validate(item)


@pytest.mark.parametrize("rank, name",
                         [("0", "run.jsonl"), ("1", "run.rank1.jsonl"), ("12", "run.rank12.jsonl"),
                          ("", "run.jsonl"), ("x", "run.jsonl")])
def test_jsonl_name_by_rank(tmp_path, monkeypatch, rank, name):
    monkeypatch.setenv("RANK", rank)
    sink = JsonlSink(str(tmp_path / "run.jsonl"))
    sink.close()
    assert sink.path == tmp_path / name and [p.name for p in tmp_path.iterdir()] == [name]


def test_jsonl_says_at_once_when_it_cannot_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        JsonlSink(tmp_path / "missing" / "run.jsonl")


def test_logger_sink_is_silent_unless_info_is_enabled(caplog):
    logger = logging.getLogger("gnnaccel")
    sink = LoggerSink(show=False)
    with caplog.at_level(logging.WARNING, logger="gnnaccel"):
        sink(record())
    assert caplog.records == []
    with caplog.at_level(logging.INFO, logger="gnnaccel"):
        sink(record(rejected=[{"candidate": "b", "code": "GA203", "text": "float64", "hint": ""}]))
    sink.close()
    (entry,) = caplog.records
    assert entry.levelno == logging.INFO and "\n" not in entry.getMessage()
    for word in ("forward", "pyg", "GATConv", "cuda", "gat_forward", 'ruled out "b": GA203 float64'):
        assert word in entry.getMessage()
    assert logger.level == logging.NOTSET


def test_logger_sink_shows_lines_where_nothing_is_set_up(monkeypatch, capsys):
    logger = logging.getLogger("gnnaccel")
    monkeypatch.setattr(logger, "propagate", False)
    sink = LoggerSink()
    assert logger.isEnabledFor(logging.INFO) and len(logger.handlers) == 1
    graph = {"num_src": 4, "num_dst": 5, "num_edges": 6}
    sink(record(name="convs.0", graph=graph, cost_us=7.4, cache="hit", dtype="half"))
    sink.close()
    assert logger.handlers == [] and logger.level == logging.NOTSET
    out = capsys.readouterr()
    assert out.out == "" and out.err.endswith(
        "forward pyg convs.0 (GATConv) -> cuda, gat_forward, 4->5 nodes, 6 "
        "edges, half, structure cache hit, "
        "estimated 7 us\n")


def test_logger_sink_adds_no_handler_where_there_is_one(monkeypatch):
    logger = logging.getLogger("gnnaccel")
    monkeypatch.setattr(logger, "propagate", False)
    handler = logging.NullHandler()
    logger.addHandler(handler)
    try:
        sink = LoggerSink()
        assert logger.handlers == [handler]
        sink.close()
        assert logger.handlers == [handler]
    finally:
        logger.removeHandler(handler)


def test_terminal_handler_is_rich_where_rich_is(monkeypatch):
    rich = pytest.importorskip("rich.logging")
    monkeypatch.setattr(sinks.sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(sinks._stderr_handler(), rich.RichHandler)
    monkeypatch.setitem(sinks.sys.modules, "rich.logging", None)
    assert type(sinks._stderr_handler()) is logging.StreamHandler


def test_a_distinct_decision_is_told_once_and_counted_at_the_end(caplog):
    graph = {"num_src": 4, "num_dst": 4, "num_edges": 100}
    why = [{"candidate": "kernels", "code": "GA301", "text": "estimated 7 us", "hint": ""}]
    with caplog.at_level(logging.INFO, logger="gnnaccel"):
        sink = LoggerSink(show=False)
        for call in range(5):
            sink(record(name="convs.0", graph={**graph, "num_edges": 100 + call}, cost_us=call,
                        cache="hit" if call else "miss"))
            sink(record(name="convs.1", route="native", kernel=None, graph=graph,
                        rejected=[{**why[0], "text": f"estimated {call} us"}]))
        sink(record(name="convs.0", graph={**graph, "num_edges": 1000}, cache="miss"))
        assert len(caplog.records) == 4  # the first look-up missed, and a larger graph
        sink.close()
        sink.close()
    told = [entry.getMessage() for entry in caplog.records[4:]]
    assert told == ["5 times: forward pyg convs.1 (GATConv) -> native, GA301",
                    "4 times: forward pyg convs.0 (GATConv) -> cuda, gat_forward, structure cache "
                    "hit"]


def test_counts_are_told_when_the_interpreter_ends():
    code = ("import gnnaccel\nfrom gnnaccel.dispatch.observe import records\n"
            "gnnaccel.enable(log=True)\nfor _ in range(3):\n"
            "    records.emit(records.new(host='pyg', layer='GATConv', route='native'))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count("GATConv -> native") == 2, done.stderr
    assert done.stderr.endswith("3 times: forward pyg GATConv -> native\n")


def test_no_sink_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records.emit(record())
