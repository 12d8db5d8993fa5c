"""Attention in its kinds, the backends that compute it, and what turns, scales and remembers its keys."""
