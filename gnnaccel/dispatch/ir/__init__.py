"""`Program`, the language in which layers are stated, and the fused kernels recognised in it."""
