"""Quantised checkpoints: their methods (names of tensors), formats (blocks and scales) and codes (numbers).

May import the checkpoints and the errors of `convert`; for the rest of the package a reader returns dense
weights.
"""
