"""Training steps of whole models: configurations (shapes), processes (pool), and measurement (step)."""
