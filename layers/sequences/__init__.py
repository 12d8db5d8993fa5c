"""The batch next to the hidden states: `Sequences`, its frozen parts, rotary tables, caches, notes of layers.

May import the specs and the kernels; every layer may import this package.
"""
