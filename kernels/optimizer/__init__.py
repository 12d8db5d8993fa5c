"""Optimizers: AdamW's update, for each representation of bfloat16 weights.

May import only the folder above.
"""
