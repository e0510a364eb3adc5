"""Losses that couple samples, over the whole window."""
