"""DGL's backend operations, which run all message passing."""
