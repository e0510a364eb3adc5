"""What a loss's autograd graph shows: its terms, and what each is divided by."""
