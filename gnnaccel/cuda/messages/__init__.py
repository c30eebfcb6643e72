"""Kernels that are written for users' messages."""
