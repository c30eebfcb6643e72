"""Whether this process runs over a part. Asked on the way of calls, so it imports nothing."""
from __future__ import annotations

from typing import Any

#: the `session.Session` of the active part; None while layers run over whole graphs
current: Any = None
