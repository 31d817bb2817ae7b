"""Deciding: a TrainingGraph, costs and a budget in; a Plan out. Passes carry it out."""
