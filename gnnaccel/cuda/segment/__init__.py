"""Products with a matrix for each relation, and of tall matrices."""
