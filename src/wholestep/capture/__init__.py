"""Capture: from a model, a loss, an optimizer and a batch to a TrainingGraph."""
