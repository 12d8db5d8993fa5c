"""From Hugging Face files to tensors and back: config.json, weight maps, checkpoint files, and the hub.

Errors and JSON files are here, for the rooms `config` and `checkpoints`. May import torch, safetensors and
huggingface_hub, and no other part of the package.
"""
