"""Optimizers: the update of AdamW, in each way to keep bfloat16 weights."""
