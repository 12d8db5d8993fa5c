"""Image encoders, one file per kind: `vision` (config to spec), `NAMES` (in checkpoints), `TINY` (for tests).

May import `common`, the specs and the conversion package; vision-language families import it.
"""
