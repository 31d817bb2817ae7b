"""Models in plain PyTorch, for the presets that need nothing else installed."""
