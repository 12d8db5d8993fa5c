"""Pictures as SVG text, without a drawing library: memory as bars, and the layers of a model.

May import the specs.
"""
