"""``python -m gnnaccel log``: options."""
from __future__ import annotations

import json
import sys

from gnnaccel.dispatch.observe.records import ROUTES
from gnnaccel.profile.log import decisions, summary


def add_parser(commands) -> None:
    parser = commands.add_parser("log",
                                 help="summarise, filter and compare JSONL logs; export decisions")
    parser.set_defaults(run=run)
    parser.add_argument("file", metavar="FILE.jsonl")
    parser.add_argument("--diff", metavar="OTHER.jsonl",
                        help="which calls OTHER decided otherwise; exit status 1 if any")
    parser.add_argument("--layer", action="append", metavar="NAME",
                        help="only this class, qualified name or re: pattern; repeatable")
    parser.add_argument("--route", choices=ROUTES, help="only calls on this route")
    parser.add_argument("--code", metavar="GA...", help="only calls with this reason")
    parser.add_argument("--records", action="store_true",
                        help="print the records themselves, one JSON object per line")
    parser.add_argument("--export", metavar="DECISIONS.json",
                        help="write what was decided, for enable(decisions=...)")
    parser.add_argument("--json", action="store_true", help="the summary or difference as JSON")


def run(options, arguments: list[str]) -> int:
    """Read and report. 2 when a file cannot be read; with ``--diff`` 1 when the runs differ."""
    try:
        found = _read(options.file, options)
        other = _read(options.diff, options) if options.diff else None
        if options.export:
            count = decisions.export(found, options.export)
            print(f"wrote {count} decisions to {options.export}")
            return 0
    except (OSError, ValueError) as problem:
        print(f"log: {problem}", file=sys.stderr)
        return 2
    if other is not None:
        changed = summary.difference(found, other)
        print(json.dumps(changed, indent=1) if options.json else summary.difference_text(changed))
        return int(bool(changed))
    if options.records:
        for record in found:
            print(json.dumps(record))
    else:
        summed = summary.summarise(found)
        print(json.dumps(summed, indent=1) if options.json else summary.text(summed))
    return 0


def _read(path: str, options) -> list:
    log = summary.read(path)
    for problem in log.problems[:3]:
        print(f"log: {path}, {problem}; left out", file=sys.stderr)
    if len(log.problems) > 3:
        print(f"log: {path}: {len(log.problems)} such lines in all", file=sys.stderr)
    return list(summary.chosen(log.records, options.layer, options.route, options.code))
