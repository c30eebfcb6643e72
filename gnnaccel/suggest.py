"""Near matches for error messages."""
from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(seen: str, allowed: Iterable[str], limit: int = 3) -> list[str]:
    """Up to ``limit`` of ``allowed`` that look like ``seen``, best first; letter case is
    ignored."""
    by_folded: dict[str, str] = {}
    for word in allowed:
        by_folded.setdefault(word.casefold(), word)
    return [by_folded[m] for m in difflib.get_close_matches(seen.casefold(), by_folded, n=limit,
                                                            cutoff=0.6)]


def did_you_mean(seen: str, allowed: Iterable[str]) -> str:
    """`` Did you mean 'a' or 'b'?``, with the leading space, or nothing."""
    words = [repr(word) for word in near(seen, allowed)]
    return f" Did you mean {' or '.join(words)}?" if words else ""
