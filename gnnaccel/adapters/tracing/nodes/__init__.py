"""Stand-ins for values per node."""
