"""Linear layers: plain, several packed into one, with low-rank paths (LoRA), and with clipped inputs.

May import the shards of checkpoints, and no other layer; every room above it may import it.
"""
