"""Token mixers for pictures, whose patches form grids.

Imports attention's calls of torch's kernels, projections, recompute, sequences and specs.
"""
