"""Reading a config.json without overlooking a key."""
