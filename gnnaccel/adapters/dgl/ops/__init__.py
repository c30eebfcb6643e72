"""DGL's backend operations, to which all message passing comes."""
