"""The accumulation window and the training state, for the Trainer and for hand-written loops."""
