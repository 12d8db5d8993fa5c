"""Transformer blocks: how a mixer, an MLP, norms and residual streams are connected.

May import attention, experts and parts. A new topology is a new block, never a flag of an old one.
"""
