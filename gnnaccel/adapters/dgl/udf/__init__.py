"""Message and reduce functions that users write, as operations that kernels can run.

`functions` runs a function once on stand-ins, `messages` has those for batches of edges and of
nodes, `features` those for tensors. `memory` keeps the results of these runs, `running` makes
operations of them. `replaced` puts this in front of DGL's own code.
"""
