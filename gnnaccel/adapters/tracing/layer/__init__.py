"""Stand-ins for a layer, its modules and what else a function reads; and guards of what it read."""
