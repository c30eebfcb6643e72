"""Index arrays of graphs, and how rows of edges are divided among warps."""
