"""Message passing of layers without an adapter and of users' own: ``propagate``, ``scatter`` and
what layers derive from a graph.
"""
