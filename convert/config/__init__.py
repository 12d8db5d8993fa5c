"""Reading config.json with a check that no key is ignored.

May import the errors and the files of `convert`; knows no family.
"""
