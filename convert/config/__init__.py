"""Reading config.json with a check that no key is ignored."""
