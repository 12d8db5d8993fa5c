"""Recurrent mixers: short convolutions, linear attention, and the states that they carry.

May import parts, projections, recomputation, the batch (`sequences`), specs and kernels. Blocks import it.
"""
