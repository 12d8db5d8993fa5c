"""Norms: RMSNorm with and without the residual add, LayerNorm."""
