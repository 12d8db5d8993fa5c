"""Token mixers for pictures, whose patches form grids, an encoder by convolutions over pixels, and the tiles
that images are cut into.

Imports attention's calls of torch's kernels, parts, projections, recompute, sequences and specs.
"""
