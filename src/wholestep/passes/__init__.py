"""Rewrites of a TrainingGraph, one per file; `pipeline.py` is the ordered table."""
