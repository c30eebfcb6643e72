"""Rows in fewer bytes."""
