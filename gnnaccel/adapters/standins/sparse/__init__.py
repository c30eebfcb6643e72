"""Stand-in for ``torch_sparse``, over torch's own operations."""
