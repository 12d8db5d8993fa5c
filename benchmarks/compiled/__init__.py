"""Compilation of every kernel for GPUs that this machine does not have: `python -m benchmarks devices`."""
