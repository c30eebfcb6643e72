"""Graphs as views of the caller's tensors: which tensors are the same, their structures, the cache
of these, and counts of a graph's calls.
"""
