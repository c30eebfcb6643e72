"""Would gnnaccel make it faster? A script, or a step of one, run natively and enabled in turn, and
one verdict: `blocks.gain` in Python, `cli` for ``python -m gnnaccel gain script.py``."""
