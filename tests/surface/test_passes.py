"""The option ``passes``, from block to block."""
from __future__ import annotations

import gnnaccel
from gnnaccel.dispatch.policy import config


def test_passes_are_kept_until_they_are_given_again(host):
    nn = host.load()
    gnnaccel.enable(passes="compaction")
    gnnaccel.enable(when="supported")
    assert config.current().passes == ("compaction",
                                       ) and gnnaccel.status()["config"]["passes"] == ("compaction",
                                                                                       )
    with gnnaccel.enabled(passes=()):
        assert config.current().passes == () and nn.Conv().forward(1) == 102
        with gnnaccel.enabled(backend="torch"):
            assert config.current().passes == ()
    assert config.current().passes == ("compaction",)
    gnnaccel.enable(passes=config.PASSES)
    assert config.current() == config.Config(when="supported")
    gnnaccel.disable()
    gnnaccel.enable()
    assert config.current().passes == config.PASSES
