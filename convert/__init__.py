"""Reading config.json, the weight algebra, streaming checkpoint files, and the hub."""
