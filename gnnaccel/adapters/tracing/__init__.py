"""How users' functions are read: each runs once on stand-ins for its arguments, which write down
what it computes. Knows no host."""
