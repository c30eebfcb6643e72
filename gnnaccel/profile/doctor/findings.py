"""`Finding`: what one check of the doctor came to."""
from __future__ import annotations

from dataclasses import asdict, dataclass

STATUSES = ("ok", "note", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """``status``: "ok"; "note", worth knowing, nothing to fix; "warn", works, but not as it
    could; "fail". The last two have a ``remedy``."""

    group: str
    name: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is none of {', '.join(STATUSES)}")
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"{self.name}: a finding that is {self.status} needs a remedy")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
