"""How a loss is reduced: looks at samples of one window, and what they show."""
