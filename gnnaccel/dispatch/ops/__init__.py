"""Message passing as single operations: generalised products of a graph's adjacency (gspmm),
functions of the two ends of each edge (gsddmm), softmax over a node's edges, reductions and
products by segment.

`torch_ops` defines them and runs everywhere; `cuda_ops` runs the hot forms by kernels;
`calls` puts the two together for one call, `route` takes the decision.
"""
