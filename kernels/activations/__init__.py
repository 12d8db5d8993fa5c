"""Gated activations and softmax."""
