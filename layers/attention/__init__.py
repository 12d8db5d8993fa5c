"""Self-, shared, latent and cross-attention, the backends that compute them, and norms of queries and keys.

May import the kernels, specs, projections, parts, recompute and sequences; blocks import this package.
"""
