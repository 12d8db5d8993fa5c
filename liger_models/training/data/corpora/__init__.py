"""Corpora: tokenized documents in a folder, written once and memory-mapped.

May import only the conversion package's files and errors; the data package reads and writes corpora.
"""
