"""Kernels of the published attention layers."""
