"""The mathematics of gradient accumulation; knows no Trainer and no release."""
