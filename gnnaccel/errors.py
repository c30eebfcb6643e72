"""Exceptions that gnnaccel raises."""


class GnnaccelError(Exception):
    """Base of gnnaccel's own exceptions."""


class UnknownLayerError(GnnaccelError, LookupError):
    """A rule names a layer that does not exist; the message lists near matches."""


class FallbackError(GnnaccelError, RuntimeError):
    """A call ran, or would run, natively while ``on_fallback="raise"``; the message lists the
    reasons."""


class GraphError(GnnaccelError, IndexError, RuntimeError, ValueError):
    """``edge_index`` names a node that does not exist, or ``edge_type`` a relation. The hosts raise
    an IndexError, a RuntimeError or a ValueError then, whichever of their steps comes upon it
    first. Messages about ids end in `VALID`, as PyG's do in effect.

    Also where a CUDA graph is captured of a graph whose structure cannot be made within it."""


VALID = "Please ensure that all ids are valid indices and try again"


class PatchError(GnnaccelError, RuntimeError):
    """An attribute of the host cannot be replaced: it is replaced already, or it does not exist."""


class HostLimitError(GnnaccelError, NotImplementedError):
    """The host library, as it is installed, cannot do this; the message names the limit and what to
    do instead."""


class PartitionError(GnnaccelError, ValueError):
    """A partitioned graph, or a call over one, is not what it has to be: a folder that is
    half-written or was changed, a part on the wrong rank, features of another length, a layer that
    needs all nodes at once. The message says what was seen, what is needed and what to do."""


class OffloadError(GnnaccelError, RuntimeError):
    """A call over rows in the host's memory cannot run in bands on the GPU. The message names the
    layer or the operation, and says what to do."""
