"""Rotary positions: alone, with the split of q|k|v, and with the norm of queries and keys."""
