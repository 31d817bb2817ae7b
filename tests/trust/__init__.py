"""Trainings whose Python changes from step to step, each trained beside eager PyTorch."""
