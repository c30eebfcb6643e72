"""PyG's layers and models for the benchmark and for compiling kernels ahead."""
