"""Stand-ins for what attention is made of."""
