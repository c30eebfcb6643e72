"""From records to files, tables, targets and pictures, on a small made-up result."""
from __future__ import annotations

import subprocess
import sys

import pytest

from gnnaccel.profile.bench import metrics, result, table, targets
from gnnaccel.profile.bench.result import Record, Result


def timed(ms: float) -> dict:
    return dict(ms=ms, p10_ms=ms, p90_ms=ms, min_ms=ms, first_ms=2 * ms, calls=1, batches=3)


def layer(shape, impl, ms=None, mode="forward", error=None, name="GAT 8x8", device="cuda",
          **values) -> Record:
    return Record("layer", shape, name, mode, impl, device, timed(ms) if ms else None,
                  {"width": 64, **values}, error)


@pytest.fixture
def made_up() -> Result:
    return Result({"gpu": "Made-up GPU", "torch": "2.11", "date": "2025-01-01"},
                  {"suite": "attention"}, [
        Record("shape", "arxiv", device="cuda",
               values={"num_nodes": 5, "num_edges": 9, "max_in_degree": 3}),
        layer("arxiv", "native", 8.8, peak_mib=900.0), layer("arxiv", "compiled", 1.04),
        layer("arxiv", "gnnaccel", 0.4, peak_mib=50.0, routes={"cuda": 12}, reasons={}),
        Record("check", "arxiv", "GAT 8x8", "forward", device="cuda",
               values={"output rel_l2": 1e-6, "output max_abs": 1e-5, "x.grad rel_l2": 3e-6}),
        layer("arxiv", "native", 16.0, "training"), layer("arxiv", "gnnaccel", 2.0, "training"),
        layer("reddit", "native", error="out of memory"), layer("reddit", "gnnaccel", 7.4),
        layer("reddit", "compiled", error="RuntimeError: a long story | with a bar"),
        Record("floor", "reddit", "64", impl="uniform", device="cuda", timing=timed(3.7)),
        Record("floor", "reddit", "64", impl="actual", device="cuda", timing=timed(5.0)),
        Record("fresh", "fresh-100k", "2-layer GAT", "training", "native", "cuda", timed(3.0)),
        Record("fresh", "fresh-100k", "2-layer GAT", "training", "gnnaccel", "cuda", timed(2.0)),
        Record("structure", "reddit", "csc+csr", "", "gnnaccel", "cuda", timed(50.0)),
        Record("overhead", "cora", "GAT 8x8", "forward", "gnnaccel", "cuda", None,
               {"enabled_us": 40.0, "bare_us": 28.0, "overhead_us": 12.0}),
        Record("kernel", "reddit", "additive 8x8", "forward", "gnnaccel", "cuda", timed(5.1),
               {"width": 64}),
        layer("cora", "native", 1.0, device="cpu"), layer("cora", "gnnaccel", 1.0, device="cpu"),
    ])


def test_file_round_trip(made_up, tmp_path):
    path = tmp_path / "bench.json"
    made_up.save(path)
    assert result.load(path) == made_up
    assert list(tmp_path.iterdir()) == [path]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"format": "something"}')
    with pytest.raises(ValueError, match="other.json"):
        result.load(path)


def test_later_results_replace_earlier(made_up):
    newer = Result({"gpu": "Newer"}, {}, [layer("arxiv", "gnnaccel", 0.2)])
    merged = result.merge([made_up, newer])
    assert len(merged.records) == len(made_up.records)
    assert merged.provenance == {"gpu": "Newer"}
    assert merged.one(kind="layer", shape="arxiv", mode="forward", impl="gnnaccel").ms == 0.2


def test_metrics_of_a_cell(made_up):
    cells = {(cell.kind, cell.shape, cell.mode): cell for cell in metrics.cells(made_up)}
    arxiv, reddit = cells["layer", "arxiv", "forward"], cells["layer", "reddit", "forward"]
    assert arxiv.metric("vs_native") == pytest.approx(22)
    assert arxiv.metric("vs_compiled") == pytest.approx(2.6)
    assert arxiv.metric("peak_mib") == 50
    assert arxiv.metric("rel_l2") == 3e-6
    assert arxiv.route == "cuda"
    assert reddit.metric("vs_native") is None
    assert reddit.metric("vs_floor") == pytest.approx(2.0)
    assert "layer-cpu" in {cell.kind for cell in cells.values()}


def test_targets_are_judged_by_the_worst_cell(made_up):
    verdicts = {verdict.target.text(): verdict for verdict in targets.judge(made_up)}
    assert verdicts["layer arxiv GAT 8x8 forward: vs_native >= 20"].met is True
    assert verdicts["layer arxiv GAT 8x8 training: vs_native >= 10"].met is False
    assert verdicts["layer reddit GAT 8x8 forward: vs_floor <= 2.5"].met is True
    assert verdicts["structure reddit csc+csr: ms <= 40"].met is False
    assert verdicts["overhead: us <= 15"].met is True
    assert verdicts["layer-cpu: vs_native >= 0.95"].met is True
    assert verdicts["layer proteins GAT 8x8 forward: vs_native >= 50"].met is None


@pytest.mark.parametrize("style", ["rich", "markdown"])
def test_tables_show_times_failures_and_targets(made_up, style, capsys):
    table.show(made_up, style)
    shown = capsys.readouterr().out
    for text in ("Made-up GPU", "8.8", "22x", "out of memory", "failed [1]", "a long story",
                 "MISSED", "2x", "12 us"):
        assert text in shown, text


def test_markdown_rows_have_as_many_cells_as_columns(made_up):
    for section in table.sections(made_up):
        assert all(len(row) == len(section.columns) for row in section.rows), section.title


@pytest.mark.long
def test_plot_is_a_png(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    from gnnaccel.profile.bench import plot

    path = tmp_path / "bench.png"
    plot.draw(made_up, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_reports_need_no_torch(made_up, tmp_path):
    made_up.save(tmp_path / "bench.json")
    code = ("import sys; sys.modules['torch'] = None; from gnnaccel.__main__ import main; "
            "sys.exit(main(['bench', '--from', sys.argv[1], '--table', 'markdown']))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "bench.json")],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Made-up GPU" in done.stdout
