"""The benchmark behind ``python -m gnnaccel bench``: what gnnaccel gains, against what, and how far
the floor is."""
