"""From what a few forwards show to how a loss is reduced, and what it counts."""
