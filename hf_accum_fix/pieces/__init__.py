"""Another cut of the same global batch: pieces of micro-batches, as few as fit, and other machines."""
