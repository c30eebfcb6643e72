"""``python -m gnnaccel [options] script.py args...``: any script with gnnaccel enabled, none of it
edited."""
from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

from gnnaccel import launch
from gnnaccel.dispatch.policy.config import CHOICES
from gnnaccel.errors import GnnaccelError
from gnnaccel.suggest import did_you_mean

_WITH_VALUE = ("--exclude", "--include", "--backend", "--when", "--report", "--decisions")
#: the smallest graph that --partition divides: below, messages between processes take longer
PARTITION_EDGES = 10_000
_TARGETS = {"-m": launch.module, "-c": launch.command}


def split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """(our options, "-m" or "-c" or "" for a script, what is run and its arguments). Whatever
    follows it is the script's."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return arguments[:at], "", arguments[at + 1:]
        if word[:2] in _TARGETS:  # -m name, -mname
            return (arguments[:at], word[:2],
                    [word[2:], *arguments[at + 1:]] if word[2:] else arguments[at + 1:])
        if not word.startswith("-") or word == "-":
            return arguments[:at], "", arguments[at:]
        at += 2 if word in _WITH_VALUE else 1
    return arguments, "", []


def add_options(parser: argparse._ActionsContainer) -> None:
    """The options of a run."""
    add_enable_options(parser)
    parser.add_argument("--partition", nargs="?", const=PARTITION_EDGES, type=int,
                        metavar="EDGES",
                        help="in each of torchrun's processes: divide layers over graphs of at "
                             f"least EDGES edges ({PARTITION_EDGES}) among the processes; "
                             "--partition=EDGES")
    parser.add_argument("--autotune", action="store_true",
                        help="time the ways that layers can go, keep the fastest, and take what "
                             "earlier runs kept")
    parser.add_argument("--profile", action="store_true",
                        help="at the end, print where the time went")
    parser.add_argument("--lines", action="store_true",
                        help="with --profile: by the lines that call layers, too")
    parser.add_argument("--compare", action="store_true",
                        help="run each layer natively as well and compare")
    parser.add_argument("--report", metavar="OUT.html",
                        help="at the end, write a page about the run")


def add_enable_options(parser: argparse._ActionsContainer) -> None:
    """Those that `enable_options` makes arguments of ``enable()``."""
    parser.add_argument("--log", nargs="?", const=True, metavar="FILE.jsonl",
                        help="a line per distinct decision on stderr, with counts at the end; "
                             "with --log=FILE.jsonl a record per decision in a file")
    parser.add_argument("--exclude", action="append", metavar="NAME,...",
                        help="layers that stay native: class names, names, re: patterns")
    parser.add_argument("--include", action="append", metavar="NAME,...", help="only these layers")
    parser.add_argument("--strict", action="store_true",
                        help="raise an error when a call runs natively that no rule excludes")
    parser.add_argument("--backend", choices=CHOICES["backend"])
    parser.add_argument("--when", choices=CHOICES["when"])
    parser.add_argument("--capture", action="store_true", default=None,
                        help="replay the calls of modules as CUDA graphs, once they repeat")
    parser.add_argument("--offload", action="store_const", const="auto",
                        help="PyG's layers run over features in the host's memory in bands")
    parser.add_argument("--decisions", metavar="FILE.json",
                        help="keep to the decisions in this file (log --export)")


def run(options: argparse.Namespace, kind: str, target: list[str]) -> int:
    """Enable gnnaccel and run ``target``. What it raises comes through; the exit status
    otherwise."""
    launch.hide(__file__, os.path.join(os.path.dirname(__file__), "__main__.py"))
    try:
        if options.partition is not None:
            _partition(options.partition)
        observer = _start(options)
    except (ValueError, OSError, GnnaccelError) as problem:
        return _complain(str(problem), 2)
    name, *arguments = target
    try:
        _TARGETS.get(kind, launch.script)(name, arguments)
    except launch.CannotRun as problem:
        return _complain(f"{problem}{_meant(kind, name)}", problem.status)
    finally:
        if observer is not None:
            _observe().finish(observer)
    return 0


def enable_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``enable()`` that the command line gives."""
    found: dict[str, Any] = {name: _names(getattr(options, name))
                             for name in ("include", "exclude")}
    if options.autotune and options.decisions is not None:
        raise ValueError("--autotune keeps to what it has timed; leave --decisions out")
    found.update(log=options.log, decisions=options.autotune or options.decisions,
                 backend=options.backend, when=options.when,
                 on_fallback="raise" if options.strict else None, capture=options.capture,
                 offload=options.offload)
    return {name: value for name, value in found.items() if value is not None}


def _start(options: argparse.Namespace) -> Any:
    """Enable, here and in the processes that multiprocessing will start, and begin to observe; the
    observer, or None."""
    from gnnaccel import env, session

    given = enable_options(options)
    if options.lines and not options.profile:
        raise ValueError("--lines is a part of --profile; add --profile")
    observed = options.profile or options.compare or options.report or options.autotune
    observe = _observe() if observed else None  # where it is missing, say so before anything runs
    session.enable(**given)
    if env.switch() is False:
        _complain("the environment variable GNNACCEL says off: everything runs natively", 0)
    else:
        # processes of a loader are to leave the GPU alone
        _carry({name: value for name, value in given.items() if name != "offload"})
    if observe is None:
        return None
    return observe.start(profile=options.profile, compare=options.compare, report=options.report,
                         autotune=options.autotune, lines=options.lines)


def _partition(edges: int) -> None:
    """Join torchrun's other processes, before anything else touches a GPU."""
    if importlib.util.find_spec("torch_geometric") is None:
        raise GnnaccelError("--partition divides PyG's layers, and PyG is not installed")
    from gnnaccel.adapters.pyg.distributed import script

    script.begin(edges)


def _observe() -> Any:
    try:
        from gnnaccel.profile import observe
    except ImportError as problem:
        raise GnnaccelError("--profile, --compare, --report and --autotune need "
                            f"gnnaccel.profile.observe, which cannot be imported ({problem}); "
                            "leave these options out") from problem
    return observe


def _names(lists: list[str] | None) -> tuple[str, ...] | None:
    return None if lists is None else tuple(name.strip() for text in lists
                                            for name in text.split(",") if name.strip())


def _meant(kind: str, name: str) -> str:
    from gnnaccel.__main__ import COMMANDS

    hint = "" if kind or "." in name or "/" in name else did_you_mean(name, COMMANDS)
    return hint and f".{hint}"


def _complain(text: str, status: int) -> int:
    print(f"python -m gnnaccel: {text}", file=sys.stderr)
    return status


# --- processes that multiprocessing spawns --------------------------------------------------------

class _Carried:
    """Goes with the configuration that multiprocessing hands to each process it starts; unpickled
    there, it enables gnnaccel."""

    def __init__(self, options: dict[str, Any]):
        self._options = options

    def __reduce__(self) -> tuple:
        from gnnaccel.dispatch.policy import config

        # the script may have disabled it
        return _Carried if config.active() is None else _arrive, (self._options,)


def _arrive(options: dict[str, Any]) -> _Carried:
    from gnnaccel import session

    session.enable(**options)
    return _Carried(options)


def _carry(options: dict[str, Any]) -> None:
    """A spawned process imports the script anew, but nobody enables gnnaccel there; a forked one
    has it already."""
    from multiprocessing import process

    configuration = getattr(process.current_process(), "_config", None)
    if isinstance(configuration, dict):
        configuration["gnnaccel"] = _Carried(options)
