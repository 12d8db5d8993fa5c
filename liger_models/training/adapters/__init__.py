"""Settings of low-rank adapters in a run, and the layers that get them.

Imports nothing else of the training package.
"""
