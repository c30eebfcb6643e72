"""A clean session for each test, and hosts made of files."""
from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import textwrap

import pytest

from gnnaccel import adapters, env, session
from gnnaccel.dispatch.observe import counters, records
from gnnaccel.dispatch.policy import config, rules
from tests.undone import forget_names

_serial = itertools.count()
REAL_HOSTS = dict(adapters.HOSTS)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Nothing enabled, no rules, no known classes, no variables; and a test that leaves blocks or
    sinks fails."""
    for name in list(os.environ):
        if name.startswith("GNNACCEL") or name == "RANK":
            monkeypatch.delenv(name)
    monkeypatch.setattr(rules, "KNOWN", {})
    monkeypatch.setattr(rules, "_awaited", {})
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setattr(adapters, "HOSTS", {})
    level = logging.getLogger("gnnaccel").level
    meta_path = list(sys.meta_path)
    counters.reset_stats()  # tests of other folders count too
    yield
    session.disable()
    rules.reset_rules()
    forget_names()
    counters.reset_stats()
    session.clear_records()
    assert config.current() is None and not config._cells and not session._blocks
    assert not records.listening() and not session._sinks
    logger = logging.getLogger("gnnaccel")
    # pytest's own
    ours = [handler for handler in logger.handlers if type(handler).__name__ != "LogCaptureHandler"]
    assert logger.level == level and not ours
    assert sys.meta_path == meta_path


class FakeHost:
    """A host package with one layer, ``nn.Conv``, and an adapter package that wraps its forward."""

    def __init__(self, root, monkeypatch, body: str = "") -> None:
        self.root, self.name = root, f"fakehost{next(_serial)}"
        self.adapter = f"{self.name}_adapter"
        (root / self.name / "nn").mkdir(parents=True)
        (root / self.name / "__init__.py").write_text(f"import {self.name}.nn\nversion = 7\n")
        (root / self.name / "nn" / "__init__.py").write_text(textwrap.dedent("""
            class Base:
                def forward(self, x):
                    return x
            class Conv(Base):
                def forward(self, x):
                    return x + 1
            class Plain(Base):
                pass
            """))
        (root / f"{self.adapter}.py").write_text(textwrap.dedent(body.replace("NAME", self.name) or f"""
            from gnnaccel.dispatch.policy import config, rules
            def install(patches):
                import {self.name}
                assert {self.name}.version == 7
                names = []
                for cls in ({self.name}.nn.Conv, {self.name}.nn.Plain):
                    native = cls.forward
                    def forward(self, x, native=native):
                        return native(self, x) if config.current() is None else native(self, x) + 100
                    patches.set(cls, "forward", forward)
                    rules.register_class(rules.path_of(cls))
                    names.append(cls.__name__)
                return names
            """))
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setitem(adapters.HOSTS, "fake", (f"{self.name}.nn", self.adapter))

    def load(self):
        """The imported ``nn`` module."""
        return importlib.import_module(f"{self.name}.nn")


@pytest.fixture
def host(tmp_path, monkeypatch):
    return FakeHost(tmp_path, monkeypatch)


@pytest.fixture
def make_host(tmp_path, monkeypatch):
    return lambda body="": FakeHost(tmp_path, monkeypatch, body)
