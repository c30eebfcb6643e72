"""``dgl.sparse`` where DGL has no library for it.

``dgl.sparse`` is Python over a C++ library that was built for one version of torch. Where that
library is missing, its functions are written here over torch's operations and gnnaccel's own
(`functions`), on a matrix of tensors (`matrix`). DGL's Python is loaded as it is, so
names, checks and docstrings are DGL's (`finder`). Enabled by ``gnnaccel.standins("dgl.sparse")``.
"""
