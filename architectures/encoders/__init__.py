"""Encoders of images, a file a kind: from their configs to specs, their names in checkpoints, and tiny ones
for the tests of the families that see by them.
"""
