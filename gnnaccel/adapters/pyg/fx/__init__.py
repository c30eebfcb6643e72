"""Models that `to_hetero` and `to_hetero_with_bases` make: their layers over edge types as one."""
