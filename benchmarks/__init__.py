"""Measurements beside peers, from the top of the repository: `python -m benchmarks`."""
