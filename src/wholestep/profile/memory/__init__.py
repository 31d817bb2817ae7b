"""Where the memory of a training step went, and what to do when it is too much."""
