"""Cards: what was checked of each family, and the pages that show it (`liger-models card`)."""
