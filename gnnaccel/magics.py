"""``%load_ext gnnaccel`` in IPython and Jupyter.

Loading enables gnnaccel, unloading disables it. ``%gnnaccel`` alone shows the status, and with
arguments does what the command line does: ``%gnnaccel on --when supported``, ``%gnnaccel off``,
``%gnnaccel gain step()``. ``%%gnnaccel.profile`` and ``%%gnnaccel.compare`` at the head of a cell
do for the cell what ``--profile`` and ``--compare`` do for a script. IPython takes everything up to
the first space for a magic's name, so a dot in it works; only ``%automagic`` and tab completion do
without it. Nothing here imports IPython.
"""
from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext gnnaccel``: enable gnnaccel, and register the magics with ``shell``."""
    from gnnaccel import session

    shell.register_magic_function(_line(shell), magic_kind="line", magic_name="gnnaccel")
    for name in ("profile", "compare"):
        shell.register_magic_function(_magic(shell, name), magic_kind="cell",
                                      magic_name=f"gnnaccel.{name}")
    session.enable()


def unload_ipython_extension(shell: Any) -> None:
    """Called by ``%unload_ext gnnaccel``: disable gnnaccel. The magics stay, and enable it for
    their cell only."""
    from gnnaccel import session

    session.disable()


def _magic(shell: Any, name: str) -> Callable[[str, str], None]:
    def run_cell(line: str, cell: str) -> None:
        from gnnaccel import session
        from gnnaccel.profile import observe

        if line.strip():
            raise ValueError(f"%%gnnaccel.{name} takes no arguments, got {line.strip()!r}")
        with session.enabled():
            observer = observe.start(profile=name == "profile", compare=name == "compare",
                                     report=None)
            try:
                shell.run_cell(cell)
            finally:
                observe.finish(observer)

    run_cell.__doc__ = (f"Run the cell with gnnaccel enabled, then show what ``--{name}`` shows of "
                        "a script.")
    return run_cell


# --- the line magic -------------------------------------------------------------------------------

class _Parser(argparse.ArgumentParser):
    """Refuses a line, where argparse would end the kernel."""

    def error(self, message: str) -> NoReturn:
        raise _refusal(f"%{self.prog}: {message}\n{self.format_usage().rstrip()}")


def _refusal(message: str) -> Exception:
    """IPython's own error for a wrong line, which it shows without a traceback; outside of it
    ValueError."""
    ipython = sys.modules.get("IPython.core.error")
    return ValueError(message) if ipython is None else ipython.UsageError(message)


def _parser() -> _Parser:
    from gnnaccel import runner

    parser = _Parser(prog="gnnaccel", add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="on | off | status | stats | gain")
    on = commands.add_parser("on", add_help=False, allow_abbrev=False)
    runner.add_enable_options(on)
    on.set_defaults(autotune=False)
    commands.add_parser("off", add_help=False)
    status = commands.add_parser("status", add_help=False)
    status.add_argument("--json", action="store_true")
    commands.add_parser("stats", add_help=False)
    return parser


def _line(shell: Any) -> Callable[[str], Any]:
    def gnnaccel(line: str) -> Any:
        from gnnaccel import runner, session
        from gnnaccel.dispatch.observe import counters

        word, _, rest = line.strip().partition(" ")
        if word == "gain":  # a statement has quotes of its own
            return _gain(shell, rest)
        options = _parser().parse_args(shlex.split(line))
        if options.command == "on":
            session.enable(**runner.enable_options(options))
        elif options.command == "off":
            session.disable()
        elif options.command == "stats":
            return counters.stats()
        else:
            print(session.status(json=True) if getattr(options, "json", False)
                  else session.status())
        return None

    gnnaccel.__doc__ = """Switch gnnaccel, show what it does, measure what it gains.

    %gnnaccel                                    the status
    %gnnaccel status [--json]                    likewise, or as JSON
    %gnnaccel on [--when supported] [--exclude GATConv] [--log] ...   as gnnaccel.enable()
    %gnnaccel off                                as gnnaccel.disable()
    %gnnaccel stats                              calls by layer, route and reason
    %gnnaccel gain [--seconds 10] STATEMENT      run the statement natively and enabled in turn
    """
    return gnnaccel


def _gain(shell: Any, text: str) -> Any:
    """``[--seconds S] STATEMENT``, run in the notebook's namespace."""
    from gnnaccel.profile.gain.blocks import gain

    seconds, statement = 10.0, text.strip()
    if statement.startswith("--seconds"):
        _, number, statement = (*statement.replace("=", " ", 1).split(maxsplit=2), "", "")[:3]
        try:
            seconds = float(number)
        except ValueError:
            raise _refusal(f"%gnnaccel gain: --seconds {number!r} is not a number") from None
    if not statement:
        raise _refusal("%gnnaccel gain needs a statement that does one step, such as "
                       "%gnnaccel gain step()")
    code = compile(statement, "<gnnaccel gain>", "exec")
    return gain(lambda: exec(code, shell.user_ns), seconds)
