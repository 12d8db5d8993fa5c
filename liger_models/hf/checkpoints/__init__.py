"""Conversion of weights between our layout and transformers' loader and writer.

May import convert and layers; the model classes import it.
"""
