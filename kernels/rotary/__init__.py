"""Rotary position embeddings: alone, fused with the split of q|k|v, and with the query/key norms.

May import the folder above and `norms`.
"""
