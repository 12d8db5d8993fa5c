"""Several residual streams: their weights, weighted sums and mixtures.

May import the folder above.
"""
