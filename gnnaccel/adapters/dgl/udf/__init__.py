"""Message and reduce functions that users write, read as what kernels can run.

`functions` runs a function once on stand-ins, `messages` has those for a batch of edges, `mailbox`
those for a batch of nodes, `features` those for tensors. `memory` keeps what was found, `running`
makes operations of it. `replaced` puts this in front of DGL's own code.
"""
