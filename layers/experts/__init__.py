"""Mixture of experts: routers, experts on one or many devices, and load balancing.

May import parts, projections, recomputation, the batch (`sequences`), specs and kernels. Blocks import it.
"""
