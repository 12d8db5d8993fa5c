"""Cards: the checks of each family, and the pages that show them (`liger-models card`).

May import models, training and the registry; only the command line imports it.
"""
