"""Linear layers: plain, several in one, with low-rank paths beside them, and with clipped inputs."""
