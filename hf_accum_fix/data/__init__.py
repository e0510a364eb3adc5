"""Which samples a micro-batch holds."""
