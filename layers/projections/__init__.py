"""Linear layers: plain, several packed into one, with low-rank paths (LoRA), and with clipped inputs."""
