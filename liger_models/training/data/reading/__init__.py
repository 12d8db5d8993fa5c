"""Reading of data: sources by name, a module per file format, and records in a few known forms.

May import the text package and images; knows no tokens.
"""
