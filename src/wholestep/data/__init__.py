"""Offline data: texts, images and where they come from. Nothing is downloaded."""
