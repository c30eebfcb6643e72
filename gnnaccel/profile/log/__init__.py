"""``python -m gnnaccel log``: what a JSONL file of records tells, alone or against another run."""
