"""Reading config.json, mapping weights, streaming checkpoint files, and the Hugging Face hub."""
