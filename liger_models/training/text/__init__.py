"""From text to tokens: the tokenizer and chat templates.

Imports nothing else of the training package; the data package builds on it.
"""
