"""Decoding of quantised weights in memory.

May import the folder above.
"""
