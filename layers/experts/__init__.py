"""Mixtures of experts: routers, experts on one device or many, and what keeps their load even."""
