"""``out_of_memory="split"``: a micro-batch that does not fit runs in pieces, at the gradient of the whole."""
