"""Weight a micro-batch's loss by the items of the global batch."""
