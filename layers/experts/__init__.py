"""Mixture of experts: routers, experts on one or many devices, and load balancing."""
