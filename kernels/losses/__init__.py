"""Losses over a vocabulary, of logits and of the product that makes them."""
