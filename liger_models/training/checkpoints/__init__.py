"""Training state on disk: the run folder, checkpoints, resuming, and saving from many processes.

May import the data and text packages, never the loop.
"""
