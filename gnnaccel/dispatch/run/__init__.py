"""Running attention: by kernels as nodes of autograd's graph, or by torch operations."""
