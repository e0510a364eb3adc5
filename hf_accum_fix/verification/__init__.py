"""verify(): compare gradients on a user's own trainer, model and data."""
