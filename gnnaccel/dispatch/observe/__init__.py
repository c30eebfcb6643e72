"""What is told of calls: counts, records, and who stands around a call while somebody listens."""
