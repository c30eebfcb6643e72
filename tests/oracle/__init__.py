"""A random oracle: layers, histories, user-written messages and metagraphs, drawn by chance and held against the host.

``python -m tests.oracle`` draws any number of cases; docs/testing.md says how to read what it prints.
"""
