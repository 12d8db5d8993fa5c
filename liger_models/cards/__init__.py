"""Cards: the checks of each family, and the pages that show them (`liger-models card`)."""
