"""Layers of a graph that are plain modules of torch: neither of PyG nor of DGL.

Their ``forward`` gathers rows of nodes by an ``edge_index``, computes at the edges and sums there.
It is traced as a ``message`` and an ``aggregate`` of PyG's message passing are, in one
(`tracing`): what it reduces becomes messages that kernels are written for, what it does to nodes
torch does again, node by node, and what was read of the module is compared in each call.
"""
