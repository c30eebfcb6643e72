"""``python -m gnnaccel autotune``: what has been kept. (With a script, the command line runs that
with ``--autotune``.)"""
from __future__ import annotations

import sys

from gnnaccel import store
from gnnaccel.dispatch.policy import tuned
from gnnaccel.errors import GnnaccelError


def add_parser(commands) -> None:
    parser = commands.add_parser("autotune", usage="python -m gnnaccel autotune (--list | "
                                                   "[options] script.py [arguments])",
                                 help="time the ways that a script's layers can go, and keep the "
                                      "fastest")
    parser.set_defaults(run=run)
    parser.add_argument("--list", action="store_true",
                        help="show what was timed on this machine, by environment")


def run(options, arguments: list[str]) -> int:
    """List what is kept; 1 where the folder is not known."""
    try:
        where = store.folder() / tuned.NAME
    except GnnaccelError as problem:
        print(f"autotune: {problem}", file=sys.stderr)
        return 1
    print("\n".join(lines(store.read(tuned.NAME) or {}) or [f"{where}: nothing yet"]))
    return 0


def lines(held: dict) -> list[str]:
    """The file's content for a reader."""
    found: list[str] = []
    if held.get("schema") != tuned.SCHEMA:
        return found
    for environment, entries in held["environments"].items():
        found.append(environment)
        for entry in entries.values():
            sizes = f"{entry['num_src']}->{entry['num_dst']} nodes, {entry['num_edges']} edges"
            shape = f"{entry['heads']}x{entry['width']}" if entry["heads"] else f"{entry['width']}"
            ways = ", ".join(f"{way} {ms:.3g} ms" for way, ms in entry["times_ms"].items())
            found.append(f"  {entry['layer']} {shape}, {sizes}, {entry['dtype']}, "
                         f"{'training' if entry['grad'] else 'forward'}: "
                         f"{entry['kernel'] or 'native'} ({ways})")
    return found
