"""The hosts' own test suites, run with gnnaccel enabled. Their tests are read from where they lie,
never copied."""
