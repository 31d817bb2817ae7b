"""Training: checkpoints, the Hugging Face Trainer with our step inside, and one tiny run that needs no data."""
