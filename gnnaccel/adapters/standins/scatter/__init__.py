"""Stand-in for ``torch_scatter``, over torch's own operations."""
