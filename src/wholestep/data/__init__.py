"""Offline data: texts, tokens, images, and how batches are drawn from them. Nothing is downloaded."""
