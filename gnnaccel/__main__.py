"""``python -m gnnaccel``: a script run with gnnaccel enabled, or a subcommand. Each lives with what
it is about and is imported when named."""
from __future__ import annotations

import argparse
import importlib
import os
import sys

from gnnaccel._version import __version__

#: subcommand -> (module with ``add_parser``, what it does). A script of such a name needs a path:
#: ``./bench``.
COMMANDS = {
    "bench": ("gnnaccel.profile.bench.cli", "measure gnnaccel against the host and torch.compile"),
    "gain": ("gnnaccel.profile.gain.cli",
             "run a script natively and enabled for a minute, and say what it gains"),
    "log": ("gnnaccel.profile.log.cli",
            "summarise, filter and compare JSONL logs; export decisions"),
    "doctor": ("gnnaccel.profile.doctor.cli",
               "check versions, GPU, kernels, caches and hosts, and say what to fix"),
    "calibrate": ("gnnaccel.profile.calibrate", "measure this GPU's ceilings for the cost model"),
    "autotune": ("gnnaccel.profile.autotune_cli",
                 "run a script as with --autotune; --list: what earlier runs have kept"),
    "warmup": ("gnnaccel.profile.warmup", "compile the kernels of given layers ahead"),
    "cache": ("gnnaccel.profile.cache_cli", "show or clear what is kept on disk"),
    "autostart": ("gnnaccel.autostart",
                  "let GNNACCEL=1 switch gnnaccel on in every process of this environment"),
}
_DESCRIPTION = """\
Run a script, module or command with gnnaccel enabled, as python itself would run it:

  python -m gnnaccel [options] script.py [arguments]
  python -m gnnaccel [options] -m module [arguments]
  python -m gnnaccel [options] -c code [arguments]

or one of the subcommands (--help after its name tells more):

"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["autotune"] and not {"-h", "--help", "--list"} & set(arguments[1:2]):
        arguments = ["--autotune", *arguments[1:]]
    if arguments and arguments[0] in COMMANDS:
        return _subcommand(arguments)
    from gnnaccel import runner

    head, kind, target = runner.split(arguments)
    parser = _parser()
    runner.add_options(parser.add_argument_group("options"))
    options = parser.parse_args(head)
    if not target:
        parser.error(f"{kind} needs an argument" if kind else
                     "nothing to run: name a script, -m module, -c code or a subcommand")
    return runner.run(options, kind, target)


def console() -> int:
    """The command ``gnnaccel``: as ``python -m gnnaccel``, for which Python has put the working
    directory on the path rather than the folder of the command."""
    from gnnaccel import launch

    launch.hide(sys.argv[0])
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = os.getcwd()
    return main()


def _subcommand(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=_prog(), description="Accelerated graph neural networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    importlib.import_module(COMMANDS[arguments[0]][0]).add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options, arguments)


def _parser() -> argparse.ArgumentParser:
    listed = "".join(f"  {name:<12} {text}\n" for name, (_, text) in COMMANDS.items())
    usage = f"{_prog()} [options] (script.py | -m module | -c code | subcommand) [arguments]"
    parser = argparse.ArgumentParser(prog=_prog(), usage=usage,
                                     description=_DESCRIPTION + listed, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"gnnaccel {__version__}")
    return parser


def _prog() -> str:
    """How this was called."""
    return ("gnnaccel" if os.path.basename(sys.argv[0]).startswith("gnnaccel")
            else "python -m gnnaccel")


if __name__ == "__main__":
    sys.exit(main())
