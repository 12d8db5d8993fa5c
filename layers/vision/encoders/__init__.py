"""Encoders in which learned queries read the features of an image.

May import vision, grids, blocks and what these import.
"""
