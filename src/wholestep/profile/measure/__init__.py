"""Measuring one training step: how long it takes, how long each of its calls takes, and what each had to do."""
