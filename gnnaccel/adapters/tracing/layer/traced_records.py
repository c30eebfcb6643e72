"""What stands for an object that keeps numbers and texts, such as an `argparse.Namespace` or a
dataclass, while a function is traced: the layer holds it, or it is a global value."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gnnaccel.adapters.tracing.code import naming
from gnnaccel.adapters.tracing.layer import guarded
from gnnaccel.adapters.tracing.rows.standins import Refuses, Unseen


class Record(Refuses):
    """Stands for such an object, to read its attributes. ``note(name, value)``: notes what one is,
    and gives its place; ``shown(value, place)``: what stands for it."""

    __slots__ = ("_traced_held",)

    def __init__(self, value: Any, note: Callable[[str, Any], Any], shown: Callable):
        object.__setattr__(self, "_traced_held", (value, note, shown))

    def __getattribute__(self, name: str) -> Any:
        value, note, shown = object.__getattribute__(self, "_traced_held")
        found = naming.attribute(value, name)
        if found is Unseen or hasattr(type(found), "__set__") or (
            name not in vars(value) and type(found) not in guarded.PLAIN):
            raise Unseen
        return shown(found, note(name, found))

    def _refuses(self, *args: Any) -> Any:
        raise Unseen

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuses
    __str__ = __format__ = __repr__ = _refuses
    __len__ = __contains__ = __iter__ = __getitem__ = _refuses
    __hash__ = object.__hash__
