"""Another cut of the same global batch: pieces of micro-batches that do not fit, and other machines."""
