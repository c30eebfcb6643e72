"""Stand-in for ``torch_cluster``: searches by SciPy on a CPU, by torch's own operations
elsewhere."""
