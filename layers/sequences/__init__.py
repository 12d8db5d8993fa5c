"""The batch next to the hidden states: `Sequences`, made of frozen parts (documents, positions, visibility)
and the notes that layers leave; rotary tables, the key-value cache, sequence parallelism.

May import the specs and the kernels; every layer may import this package.
"""
