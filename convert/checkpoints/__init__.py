"""Weight maps, streaming reads and writes of checkpoint files, and the hub.

May import the errors and the files of `convert`; layers import only the weight maps and the shards.
"""
