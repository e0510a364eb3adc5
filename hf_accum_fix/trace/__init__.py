"""Run forwards outside of a training step, and leave no trace."""
