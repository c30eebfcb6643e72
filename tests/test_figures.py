"""The figures of the documentation are those that their script draws."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).parents[1] / "docs" / "images" / "figures.py"


def test_the_figures_are_current():
    spec = importlib.util.spec_from_file_location("figures", SCRIPT)
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    shown = (SCRIPT.parents[1] / "kernels.md").read_text(encoding="utf-8")
    assert {file.stem for file in SCRIPT.parent.glob("*.svg")} == set(figures.FIGURES)
    for name, draw in figures.FIGURES.items():
        text = draw().svg()
        assert (SCRIPT.parent
                / f"{name}.svg").read_text(
                    encoding="utf-8") == text, "run python docs/images/figures.py"
        assert ElementTree.fromstring(text).tag.endswith("svg") and f"(images/{name}.svg)" in shown


def test_the_lanes_are_those_of_the_layout():
    from gnnaccel.cuda.runtime.launch import layout_for
    many, one = layout_for(8, 8), layout_for(1, 64)
    assert (many.vec, many.lh,
            many.hl, many.slots) == (4, 2, 8, 2) and (one.vec, one.lh, one.slots) == (4, 16, 2)
