"""Layers over dictionaries of node and edge types: HeteroConv, whose alike layers run as one."""
