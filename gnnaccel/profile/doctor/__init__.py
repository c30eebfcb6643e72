"""``python -m gnnaccel doctor``: whether everything that gnnaccel needs is there, agrees and works,
and what to do where not."""
