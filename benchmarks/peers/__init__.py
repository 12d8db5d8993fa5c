"""Peers of generation and post-training. They import nothing of this package: `training/alone.py` runs them,
too.
"""
