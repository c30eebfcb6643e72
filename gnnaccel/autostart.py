"""``python -m gnnaccel autostart``: ``GNNACCEL=1`` switches gnnaccel on in every Python process of
an environment.

Nothing in a package can run by itself when Python starts, but for a ``.pth`` file in site-packages,
and pip cannot be told to put one there. So this command does it, once per environment, on demand.
The file is one line. With ``GNNACCEL`` unset or off, that line looks at the variable and imports
nothing; otherwise it calls `start`.
"""
from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path

NAME = "gnnaccel_autostart.pth"
LINE = ("import os; os.environ.get('GNNACCEL', '').strip().casefold() in ('1', 'true', 'yes', "
        "'on') "
        "and __import__('gnnaccel.autostart').autostart.start()\n")


_started = False


def start() -> None:
    """Enable gnnaccel with the options of the environment. A wrong one becomes a line on stderr:
    Python must start."""
    global _started
    if _started:  # Python reads the .pth files of a virtual environment twice
        return
    _started = True
    from gnnaccel import session
    from gnnaccel.errors import GnnaccelError

    try:
        with warnings.catch_warnings():  # many processes of a tree have nothing to do with torch
            warnings.filterwarnings("ignore", "gnnaccel: torch is not installed", RuntimeWarning)
            session.enable()
    except (ValueError, OSError, GnnaccelError) as problem:
        print(f"gnnaccel: GNNACCEL=1 has no effect in this process: {problem}", file=sys.stderr)


def folder() -> Path:
    """The site-packages of the running Python."""
    return Path(sysconfig.get_path("purelib"))


def state(where: Path) -> str:
    """"installed", "not installed", or "outdated": a file of that name whose content is not
    ours."""
    try:
        return "installed" if (where / NAME).read_text(encoding="utf-8") == LINE else "outdated"
    except FileNotFoundError:
        return "not installed"


def install(where: Path) -> None:
    """Put the file there, whole or not at all. OSError when that is not allowed."""
    with tempfile.NamedTemporaryFile("w", dir=where, suffix=".part", delete=False,
                                     encoding="utf-8") as file:
        file.write(LINE)
    os.chmod(file.name, 0o644)
    os.replace(file.name, where / NAME)


def remove(where: Path) -> bool:
    """Take the file away; False when there was none."""
    existed = (where / NAME).exists()
    (where / NAME).unlink(missing_ok=True)
    return existed


# --- the command line -----------------------------------------------------------------------------

def add_parser(commands) -> None:
    """Add ``autostart`` to an argparse subcommand collection."""
    parser = commands.add_parser("autostart", help="let GNNACCEL=1 switch gnnaccel on in every "
                                                   "process of this environment")
    parser.set_defaults(run=run)
    parser.add_argument("action", choices=("install", "remove", "status"))
    parser.add_argument("--folder", type=Path,
                        help="the site-packages to use (default: that of this Python)")


def run(options, arguments: list[str]) -> int:
    """Do it and say so; 1 when the folder cannot be written."""
    where = options.folder or folder()
    try:
        print(_done(options.action, where))
    except OSError as problem:
        print(f"autostart: {problem}. Use a virtual environment, or --folder with a site-packages "
              "that is yours (python -m site --user-site names one)", file=sys.stderr)
        return 1
    return 0


def _done(action: str, where: Path) -> str:
    if action == "install":
        install(where)
        return (f"installed {where / NAME}: GNNACCEL=1 switches gnnaccel on in every process of "
                "this Python")
    if action == "remove":
        return (f"removed {where / NAME}" if remove(where)
                else f"nothing to remove: there is no {where / NAME}")
    from gnnaccel import env

    variables = ", ".join(f"{name}={value}" for name, value in env.given().items())
    return f"{state(where)}: {where / NAME}\nvariables: {variables or 'none is set'}"
