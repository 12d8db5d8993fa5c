"""Recurrent mixers: short convolutions, state spaces and linear attention, with their states.

May import parts, projections, recomputation, the batch (`sequences`), specs and kernels. Blocks import it.
"""
