"""Token mixers for frames of sound, in the blocks of a conformer.

Imports attention's backends, the short convolution, parts, projections, recompute, sequences and specs.
"""
