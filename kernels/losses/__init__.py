"""Losses over a vocabulary, from logits or fused with the linear layer that computes them.

May import only the folder above.
"""
