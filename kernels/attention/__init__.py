"""Our own attention: packed documents, windows, soft caps, sinks."""
