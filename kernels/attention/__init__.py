"""Flash attention over packed documents, with windows, soft caps and sinks."""
