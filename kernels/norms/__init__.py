"""Norms: RMSNorm and LayerNorm, with and without the residual add, and gated RMSNorm."""
