"""Activation memory at run time: recomputation, tiling over tokens, and offloading to the host.

May import the kernels and `sequences`; layers and blocks import it. (`memory` predicts memory use.)
"""
