"""Where texts come from: files, hub datasets, corpora that are at hand."""
