"""Token mixers for pictures of one size, whose patches form a square grid.

Imports attention's calls of torch's kernels, projections, recompute, sequences and specs.
"""
