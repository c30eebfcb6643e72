"""``python -m gnnaccel``: the command line. Each subcommand lives with what it is about and is imported when named."""
from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    from gnnaccel.profile.bench import cli as bench

    parser = argparse.ArgumentParser(prog="python -m gnnaccel", description="Accelerated graph neural networks.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_parser(commands)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    return options.run(options, arguments)


if __name__ == "__main__":
    sys.exit(main())
