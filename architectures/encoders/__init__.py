"""Encoders of images, a file a kind: `vision` makes the spec from a config, `NAMES` are those in checkpoints,
and `TINY` is a config for the tests of the families that see by it.
"""
