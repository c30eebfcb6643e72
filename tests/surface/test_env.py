"""GNNACCEL_* variables."""
from __future__ import annotations

import inspect
import os
import re
import warnings

import pytest

from gnnaccel import env, session
from gnnaccel.dispatch.policy import config


@pytest.mark.parametrize("text, value",
                         [("0", False), ("false", False), ("NO", False), ("Off", False),
                          ("1", True), ("True", True), ("yes", True), (" on ", True), ("", None),
                          ("  ", None)])
def test_switch(text, value):
    assert env.switch({"GNNACCEL": text}) is value
    assert env.switch({}) is None


@pytest.mark.parametrize("text", ["2", "enable", "nope", "01"])
def test_switch_refuses_anything_else(text):
    with pytest.raises(ValueError, match=f"GNNACCEL='{text}'.*1, true, yes, on, 0, false, no, off"):
        env.switch({"GNNACCEL": text})


@pytest.mark.parametrize("text, value",
                         [("1024", 1024), ("0", 0), ("2GiB", 2 * 2**30), ("512 MiB", 512 * 2**20),
                          ("1.5KiB", 1536), ("3kb", 3000), ("1g", 2**30), ("7B", 7),
                          ("2tb", 2 * 10**12), ("", None), ("9007199254740993", 9007199254740993)])
def test_cache_bytes(text, value):
    assert env.cache_bytes({"GNNACCEL_CACHE_BYTES": text}) == value


@pytest.mark.parametrize("text", ["-1", "two", "2 pints", "1e9", "GiB"])
def test_cache_bytes_refuses_anything_else(text):
    with pytest.raises(ValueError, match=f"GNNACCEL_CACHE_BYTES='{text}'"):
        env.cache_bytes({"GNNACCEL_CACHE_BYTES": text})


def test_options():
    assert env.options({}) == {}
    assert env.options({"GNNACCEL_BACKEND": "Torch", "GNNACCEL_WHEN": "supported",
                        "GNNACCEL_ON_FALLBACK": "warn", "GNNACCEL_LOG": "run.jsonl",
                        "GNNACCEL_RECORDS": "20", "GNNACCEL_INCLUDE": "A, re:B.*,,",
                        "GNNACCEL_EXCLUDE": "C", "OTHER": "x"}) == {
        "backend": "torch", "when": "supported", "on_fallback": "warn", "log": "run.jsonl",
        "records": 20,
        "include": ("A", "re:B.*"), "exclude": ("C",)}
    assert env.options({"GNNACCEL_LOG": "1"})["log"] is True
    assert env.options({"GNNACCEL_COMPILE": "1"}) == {"compile": True}
    assert env.options({"GNNACCEL_CAPTURE": "yes"}) == {"capture": True}
    assert env.options({"GNNACCEL_LOG": "off"})["log"] is False
    assert env.options({"GNNACCEL_LOG": "./1"})["log"] == "./1"


@pytest.mark.parametrize("name, text, hint", [("GNNACCEL_BACKEND", "gpu", "auto, cuda, torch"),
                                              ("GNNACCEL_WHEN", "supporte",
                                               "Did you mean 'supported'"),
                                              ("GNNACCEL_ON_FALLBACK", "1", "native, warn, raise"),
                                              ("GNNACCEL_RECORDS", "many", "0 for none"),
                                              ("GNNACCEL_RECORDS", "-3", "0 for none")])
def test_wrong_option_names_the_variable(name, text, hint):
    with pytest.raises(ValueError, match=f"{name}='{text}'.*{hint}"):
        env.options({name: text})


def test_unknown_variables_warn_once_with_near_matches():
    environ = {"GNNACCEL_BACKND": "cuda", "GNNACCELERATE": "x", "GNNACCEL_WHEN": "supported"}
    with pytest.warns(RuntimeWarning,
                      match="GNNACCEL_BACKND.*Did you mean 'GNNACCEL_BACKEND'") as caught:
        env.warn_unknown(environ)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.warn_unknown(environ)


def test_arguments_beat_variables(monkeypatch):
    monkeypatch.setenv("GNNACCEL_BACKEND", "torch")
    monkeypatch.setenv("GNNACCEL_WHEN", "supported")
    session.enable(backend="cuda")
    assert (config.current().backend, config.current().when) == ("cuda", "supported")


def test_variables_are_read_when_enabling_not_later(monkeypatch):
    session.enable()
    monkeypatch.setenv("GNNACCEL_BACKEND", "torch")
    session.enable(when="supported")
    assert config.current().backend == "auto"


@pytest.mark.parametrize("text, on", [("0", False), ("1", True)])
def test_the_switch_keeps_everything_native(monkeypatch, text, on):
    monkeypatch.setenv("GNNACCEL", text)
    session.enable(backend="torch")
    assert (config.current() is not None) is on
    session.disable()
    with session.enabled():
        assert (config.current() is not None) is on


def test_a_wrong_variable_stops_enable(monkeypatch):
    monkeypatch.setenv("GNNACCEL_RECORDS", "x")
    with pytest.raises(ValueError, match="GNNACCEL_RECORDS"):
        session.enable()
    assert config.current() is None


def test_only_env_reads_variables():
    import gnnaccel

    root = os.path.dirname(gnnaccel.__file__)
    readers = set()
    for folder, _, files in os.walk(root):
        for file in files:
            if file.endswith(".py"):
                with open(os.path.join(folder, file), encoding="utf-8") as opened:
                    text = opened.read()
                if "environ" in text and '"GNNACCEL' in text or "getenv(" in text:
                    readers.add(os.path.relpath(os.path.join(folder, file), root))
    # the package itself only looks whether there is anything to read
    assert readers == {"env.py", "__init__.py"}
    assert inspect.getsource(gnnaccel).count("_os.environ") == 1


def test_each_variable_that_is_read_is_known():
    """One that is not would be warned of."""
    read = set(re.findall(r"GNNACCEL_[A-Z_]*[A-Z]", inspect.getsource(env)))
    options = {f"GNNACCEL_{name.upper()}" for name in ("compile", "capture", "include", "exclude")}
    assert read | options <= set(env.VARIABLES)
