"""What a training step keeps in memory, and how it is made less: recipes, tiles, the host; and the plan."""
