"""Whether this process runs over a part. Read on the path of calls, so this imports nothing."""
from __future__ import annotations

from typing import Any

#: the `session.Session` of the active part; None while layers run over whole graphs
current: Any = None
#: with ``python -m gnnaccel --partition``: the object that divides each layer's call
divider: Any = None
#: within a layer's call: rows of sources that begin with those of the destinations, in the same
#: order, where one linear map makes both. Signatures of calls have whether there are any
leading: Any = None
#: within a layer's call with own and halo rows of each type: how many rows of each, the first ones,
#: are own: edges enter these alone. None where all rows are. Signatures have it, too
own_rows: Any = None


def each_layer() -> bool:
    """Whether layers have to run one by one, each with an exchange of its own."""
    return current is not None or divider is not None
