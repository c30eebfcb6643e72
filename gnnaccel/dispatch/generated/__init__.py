"""Messages that no family of kernels was written for: as expressions, their kernels, and what they
are on torch operations."""
