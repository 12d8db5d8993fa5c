"""Benchmarks against other libraries, run from the top of the repository: `python -m benchmarks`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
