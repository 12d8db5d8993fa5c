"""Encoders of sound, one file per kind, as in `encoders`.

May import `common`, the parts of `encoders`, the specs and the conversion package; families import it.
"""
