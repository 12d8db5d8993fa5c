"""Token mixers for pictures, whose patches form grids, and an encoder by convolutions over pixels.

Imports attention's calls of torch's kernels, parts, projections, recompute, sequences and specs.
"""
