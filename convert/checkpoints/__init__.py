"""Weight maps, streaming reads and writes of checkpoint files, and the hub."""
