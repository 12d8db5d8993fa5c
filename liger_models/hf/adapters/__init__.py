"""PEFT adapters: low-rank paths on our layers, their files, experts and quantised base weights.

May import layers and `hf.checkpoints`.
"""
