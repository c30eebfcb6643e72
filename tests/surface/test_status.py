"""What `gnnaccel.status` tells."""
from __future__ import annotations

import json

import gnnaccel
from gnnaccel import session


def test_status(host, monkeypatch):
    from gnnaccel.cuda.runtime import driver
    from gnnaccel.dispatch.observe.counters import count

    off = gnnaccel.status()
    assert (off["enabled"], off["config"], off["backend"]) == (False, None, None)
    answer = [True, "a test's GPU"]
    monkeypatch.setattr(driver, "available", lambda: tuple(answer), raising=False)
    gnnaccel.enable(when="supported")
    count("A", "cuda")
    count("B", "cuda")
    count("B", "native", "GA301")
    on = gnnaccel.status()
    assert on["enabled"] and on["config"]["when"] == "supported" and on[
        "version"] == gnnaccel.__version__
    assert (on["backend"], on["backend_text"]) == ("cuda", "a test's GPU")
    assert on["counts"] == {"calls": 3, "routes": {"cuda": 2, "native": 1}}
    assert on["versions"]["torch"].startswith("2.")
    assert set(on["versions"]) == {"torch", "torch_geometric", "dgl", "cupy"}
    answer[:] = False, "no device"
    assert (gnnaccel.status()["backend"],
            gnnaccel.status()["backend_text"]) == ("torch", "no device")
    with gnnaccel.enabled(backend="torch"):
        answer[0] = None
        assert gnnaccel.status()["backend_text"] == "chosen by the user"
    with gnnaccel.disabled():
        assert not gnnaccel.status()["enabled"]
    json.dumps(gnnaccel.status())


def test_it_reads_well_and_is_json_for_programs(host):
    from gnnaccel.dispatch.observe.counters import count

    assert str(gnnaccel.status()).startswith(f"gnnaccel {gnnaccel.__version__}, disabled here\n")
    assert "calls     none yet" in str(gnnaccel.status())
    gnnaccel.enable(when="supported", exclude=["re:x"])
    count("A", "native", "GA301")
    count("A", "torch")
    shown = repr(gnnaccel.status())
    for part in ("enabled here", "backend   torch (", "when=supported", "exclude=('re:x',)",
                 "fake waiting for its import", "calls     2: 1 native, 1 torch", "torch 2."):
        assert part in shown, part
    host.load()
    assert "fake 2 functions replaced" in str(gnnaccel.status())
    text = gnnaccel.status(json=True)
    assert isinstance(text, str) and json.loads(text) == json.loads(json.dumps(gnnaccel.status()))


def test_status_reports_what_is_not_installed_as_none(monkeypatch):
    monkeypatch.setitem(session.PACKAGES, "nothing", ("no-such-distribution", "nor-this"))
    assert gnnaccel.status()["versions"]["nothing"] is None
