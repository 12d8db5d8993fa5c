"""Activation memory at run time: recomputation, tiling over tokens, and offloading to the host.

May import the kernels and `sequences`; the layers and blocks import this package. The planner that predicts
memory use is in `memory`.
"""
