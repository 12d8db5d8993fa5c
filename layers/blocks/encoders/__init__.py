"""Blocks that only encoders have.

May import attention, experts, parts, the mixers of conformers and the base class of blocks.
"""
