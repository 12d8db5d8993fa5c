"""Conversion between Hugging Face files and tensors: config.json, weight maps, checkpoint files, the hub.

May import torch, safetensors and huggingface_hub, and no other part of the package. The subpackages share the
modules of this folder: errors, strict JSON, locks, sizes and progress bars.
"""
