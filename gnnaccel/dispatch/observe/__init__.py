"""Observing calls: counts, records, and watchers around a call while somebody listens."""
