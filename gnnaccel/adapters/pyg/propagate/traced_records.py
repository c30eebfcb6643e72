"""What stands for an object that the layer holds to keep numbers and texts in, such as an
`argparse.Namespace` or a dataclass, while a function is traced."""
from __future__ import annotations

from typing import Any

from gnnaccel.adapters.pyg.propagate import guarded, naming
from gnnaccel.adapters.pyg.propagate.standins import Refuses, Unseen


class Record(Refuses):
    """Stands for such an object, to read its attributes: what they are is noted, as if the layer
    had them. ``shown(value, place)``: what stands for one; ``read``: what was read, by place."""

    __slots__ = ("_traced_held",)

    def __init__(self, value: Any, place: tuple[str, ...], read: dict, shown: Any):
        object.__setattr__(self, "_traced_held", (value, place, read, shown))

    def __getattribute__(self, name: str) -> Any:
        value, place, read, shown = object.__getattribute__(self, "_traced_held")
        found = naming.attribute(value, name)
        if found is Unseen or hasattr(type(found), "__set__") or (
            name not in vars(value) and type(found) not in guarded.PLAIN):
            raise Unseen
        there = (*place, name)
        read[there] = guarded.seen(found)
        return shown(found, there)

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuses
    __str__ = __format__ = __repr__ = _refuses
    __len__ = __contains__ = __iter__ = __getitem__ = _refuses
    __hash__ = object.__hash__
