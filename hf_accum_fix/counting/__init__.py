"""Which inputs are items: rules that count a micro-batch."""
