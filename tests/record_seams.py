"""Writes the hashes of the installed hosts' functions into gnnaccel/adapters/seams.json, next to
those of other versions.

    python -m tests.record_seams      after the tests have passed with these versions
"""
from __future__ import annotations

import json
from pathlib import Path

import gnnaccel  # noqa: F401  (before dgl)
from gnnaccel import adapters
from gnnaccel.adapters import seams

PATH = Path(seams.__file__).with_name("seams.json")


def main() -> None:
    held = json.loads(PATH.read_text()) if PATH.exists() else {}
    for host in adapters.HOSTS:
        found = seams.collect(host)
        held.setdefault(host,
                        {})[seams.version_of(host)] = {name: hashed
                                                       for name, hashed in found.items() if hashed}
        print(f"{host} {seams.version_of(host)}: {len(found)} functions")
    PATH.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
