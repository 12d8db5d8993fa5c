"""What a training step keeps in memory, how to keep less (recipes, tiles, the host), and the plan of it."""
