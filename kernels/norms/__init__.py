"""Norms: RMSNorm and LayerNorm, with and without the residual add, and gated RMSNorm.

May import only the folder above; rotary and recurrent kernels fuse them.
"""
