"""Gated activations and softmax.

May import the folder above, and the tiles of logits in `losses`.
"""
