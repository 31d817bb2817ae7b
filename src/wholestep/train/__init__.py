"""Training: what to train (job.py), the loop and its folder (loop.py), checkpoints, and the Hugging Face Trainer with our step."""
