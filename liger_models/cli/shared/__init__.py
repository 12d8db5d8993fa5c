"""Options and helpers that several commands share.

May import everything but the commands; only `liger_models.cli` imports it.
"""
