"""Peers of generation and post-training. Nothing of ours is imported: `training/alone.py` runs them too."""
