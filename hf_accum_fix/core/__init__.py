"""One accumulation window and one training state, for both hosts: the Trainer, and hand-written loops."""
