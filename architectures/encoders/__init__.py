"""Image encoders, one file per kind.

`vision` makes the spec from a config, `NAMES` are the checkpoint names, and `TINY` is a config for the tests
of the families that use the encoder. May import `common`, the specs and the conversion package.
"""
