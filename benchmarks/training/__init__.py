"""A training step of a whole model: what is measured (shapes), in which process (pool), and how (step)."""
