"""Quantised checkpoints: recognition, formats, and decoding to float32.

A format is a table: the numbers that are stored (codes.py), the block that shares a scale (formats.py), and
the names of the tensors that make up one weight (methods.py). Files that hold a quantised weight look to the
rest of the package as if they held it dense (reader.py). Imports the checkpoints and the errors of `convert`.
"""
