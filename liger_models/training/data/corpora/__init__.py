"""Corpora: tokenized documents in a folder, written once and mapped into memory.

May import only the conversion package's files and errors; the data package reads and writes corpora.
"""
