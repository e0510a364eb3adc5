"""What accelerate, DeepSpeed and FSDP do to a loss, and errors that reach every rank."""
