"""One accumulation window and one training state, for both hosts: the Trainer, and loops written by hand."""
