"""``python -m gnnaccel doctor``: runs every check, in an order in which each may rely on those
before it."""
from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator

from gnnaccel.profile.doctor import packages, places, show
from gnnaccel.profile.doctor.show import Finding

SCHEMA = 1


def add_parser(commands) -> None:
    parser = commands.add_parser("doctor", help="check versions, GPU, kernels, caches and hosts, "
                                                "and say what to fix")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="findings as JSON on stdout")


def run(options, arguments: list[str]) -> int:
    """Print the findings; 1 when one of them is a failure."""
    with _quiet():
        findings = list(examine())
    failed = any(finding.status == "fail" for finding in findings)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "ok": not failed,
                          "findings": [finding.as_dict() for finding in findings],
                          "report": show.block(findings)}, indent=1))
    else:
        show.show(findings)
    return int(failed)


def examine() -> Iterator[Finding]:
    yield from packages.check()
    bridge = packages.bridge()
    if bridge is not None:
        yield bridge
    yield from _kernels()
    yield from places.hosts()
    yield from places.caches()
    yield from places.environment()


def _kernels() -> Iterator[Finding]:
    if packages.import_problem("torch") is not None:
        yield Finding("kernels", "all", "note", "not checked: torch cannot be imported")
        return
    from gnnaccel.cuda.runtime import driver

    ready, why = driver.available()
    if not (ready or driver.placed()):
        yield Finding("kernels", "all", "note", f"not checked: {why}")
        return
    import torch

    from gnnaccel.profile.doctor import kernels

    before = driver.compile_seconds()
    found = list(kernels.verdicts(torch.device("cpu" if driver.placed() else "cuda")))
    right = [family for family, ok, _ in found if ok]
    if right:
        yield Finding("kernels", "right", "ok",
                      f"{len(right)} of {len(found)} families: {', '.join(right)}")
    for family, ok, text in found:
        if not ok:
            yield Finding("kernels", family, "fail", text,
                          "report this with the block below; until then "
                          "gnnaccel.enable(backend='torch') leaves the kernels aside")
    seconds, count = (after - at for after, at in zip(driver.compile_seconds(), before))
    yield Finding("kernels", "compiling", "ok",
                  f"{count} kernels compiled or loaded from CuPy's cache in {seconds:.1f} s")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What packages say on stdout and stderr while they are imported is not the doctor's word."""
    with (open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere),
          contextlib.redirect_stderr(nowhere)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.stdout.flush()
            yield
