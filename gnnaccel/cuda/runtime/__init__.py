"""How kernels come to a GPU: texts, compilation, launches, captures."""
