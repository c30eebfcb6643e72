"""What a release needs agrees: the version wherever it is written, the changelog's form, and the
commands that workflows and documents name."""
from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gnnaccel

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    assert f"\nversion: {gnnaccel.__version__}\n" in read("CITATION.cff")
    newest = re.search(r"^## (\d+\.\d+\.\d+) - (unreleased|\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"),
                       re.M)
    assert newest is not None and newest[1] == gnnaccel.__version__


def test_the_changelog_has_the_form_that_it_names():
    for section in re.split(r"^## ", read("CHANGELOG.md"), flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.M)
        assert kinds and kinds == [kind for kind in ("Added", "Changed", "Fixed") if kind in kinds]
        body = re.sub(r"^(### .*| .*|- .*|)$", "", section.partition("\n")[2], flags=re.M)
        assert not body.strip(), body  # nothing but headings and their points


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml",
                                  ".github/workflows/release.yml", ".ci/run"])
def test_every_make_target_that_is_named_exists(name):
    if not (ROOT / name).exists():
        pytest.skip("a source distribution has no workflows")
    named = set(re.findall(r"\bmake ([a-z-]+)", read(name)))
    assert named and named <= TARGETS, named - TARGETS


def test_the_readme_is_short_and_names_the_commands():
    text = read("README.md")
    assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) < 850
    assert {"demo", "test"} <= set(re.findall(r"^    make ([a-z-]+)", text, re.M))


def test_a_release_names_its_repository(tmp_path):
    """Links of the README lead to the files from anywhere, and the metadata has URLs."""
    script = ROOT / ".ci" / "addresses.py"
    if not script.exists():
        pytest.skip("a source distribution has no workflows")
    for name in ("README.md", "setup.cfg"):
        (tmp_path / name).write_text(read(name), encoding="utf-8")
    where = "https://host.example/owner/gnnaccel"
    command = [sys.executable, str(script), where, "v0.2.0"]
    subprocess.run(command, cwd=tmp_path, check=True)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 30 and all(link.startswith(("https://", "#")) for link in links)
    assert f"{where}/blob/v0.2.0/docs/limits.md" in links
    assert f"{where}/raw/v0.2.0/docs/results/h200-attention.png" in links
    for link in links:  # what it leads to is there
        if link.startswith(f"{where}/"):
            path = link.removeprefix(f"{where}/").split("/", 2)[2].partition("#")[0]
            assert (ROOT / path).exists(), link
    config = configparser.ConfigParser()
    config.read(tmp_path / "setup.cfg")
    assert config["metadata"]["url"] == where
    assert f"Changelog = {where}/blob/v0.2.0/CHANGELOG.md" in config["metadata"]["project_urls"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode and "URLs already" in again.stderr
