"""Conversion between Hugging Face files and tensors: config.json, weight maps, checkpoint files, the hub.

May import torch, safetensors and huggingface_hub, and no other part of the package; errors and JSON files are
defined here, for the rooms.
"""
