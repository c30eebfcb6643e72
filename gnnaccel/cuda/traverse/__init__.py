"""Sums, extrema and weights over the edges that enter a node."""
