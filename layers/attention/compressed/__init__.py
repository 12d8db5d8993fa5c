"""Attention to compressed keys, and what makes and chooses them.

Imports attention's cached products and backends, parts, projections, recompute, sequences and specs.
"""
