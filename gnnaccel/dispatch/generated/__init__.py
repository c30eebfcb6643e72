"""Messages that no family of kernels was written for: as expressions, their kernels, and their
computation by torch operations."""
