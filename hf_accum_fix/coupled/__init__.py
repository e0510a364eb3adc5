"""Losses that couple samples, exact: each micro-batch computes the loss of the whole window."""
