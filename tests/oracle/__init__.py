"""A random oracle: layers, histories, messages and metagraphs by chance, held against the host.

``python -m tests.oracle`` draws any number of cases; see docs/testing.md.
"""
