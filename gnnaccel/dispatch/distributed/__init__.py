"""One graph over several processes: cutting it, storing its parts, and exchanging rows of nodes.

This package knows arrays and `torch.distributed`, and no host: `gnnaccel.adapters.pyg.distributed`
makes parts of PyG's data and runs PyG's layers over them.

Every node has one owner, and an edge belongs to the owner of its destination. A part numbers the
nodes that its edges come from over [own | halo]: first the own nodes, ascending by their number in
the whole graph, then the halo, the nodes of other parts from which edges enter, ordered by owner
and then by number.
"""
