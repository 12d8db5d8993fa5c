"""Mixture of experts: routing and the experts' matrix products.

May import the folder above, `activations` and `float8`.
"""
