"""What stands in for ``torch_scatter``, over torch's own operations."""
