"""Linear layers: plain, several packed into one, with low-rank paths (LoRA), and with clipped inputs.

May import the readers of checkpoint shards, and no other layer; every folder above may import it.
"""
