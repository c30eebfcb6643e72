"""Whole modules as CUDA graphs, where ``enable(capture=True)`` asks for them.

`modules` wraps ``torch.nn.Module.__call__`` and decides which module's calls are captured, `graphs`
captures and replays, `state` compares the Python state of modules, `reads` that of the names which
their code reads, and `values` takes arguments and results apart.
"""
