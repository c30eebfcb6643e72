"""PyG's data and layers over a partitioned graph (`gnnaccel.dispatch.distributed`).

While a part is active, ``__call__`` of `MessagePassing`, one method, is replaced, so models stay as
they are and classes that users write are reached too. Within a call each tensor of source nodes
gets its halo rows right before they are gathered.
"""
