"""PyG's layers over rows that stay in the host's memory: `gnnaccel.offload`."""
