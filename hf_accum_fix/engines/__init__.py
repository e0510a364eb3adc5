"""What accelerate, DeepSpeed and FSDP do to a loss, and what ranks tell one another."""
