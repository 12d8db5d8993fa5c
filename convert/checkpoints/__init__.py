"""The weight algebra, checkpoint files read and written as streams, and the hub."""
