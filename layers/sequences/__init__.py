"""The batch next to the hidden states: document bounds, positions, caches and routing decisions.

May import the specs and the kernels; every layer may import this package.
"""
