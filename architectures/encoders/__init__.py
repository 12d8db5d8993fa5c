"""Encoders of images, one file a kind.

`vision` makes the spec from a config, `NAMES` are the names in checkpoints, and `TINY` is a config for the
tests of the families that use the encoder. May import `common`, the specs and the conversion package.
"""
