"""verify(): the proof of the promise on a user's own trainer, model and data."""
