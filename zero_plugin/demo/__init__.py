"""Trains a small byte-level GPT on the standard library's source text."""
