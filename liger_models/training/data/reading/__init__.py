"""Reading of data: sources by name, and their records in a few known forms.

    sources.py           names of files, folders and hub data sets
    lines.py arrays.py spreadsheets.py tables.py     a reader per file format
    schema.py            which columns hold which fields
    alpaca.py sharegpt.py    other tools' forms of records
    records.py           fields to records, with every check

May import the text package and images; knows no tokens.
"""
