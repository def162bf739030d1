"""Keeps a run within its memory: plans it, looks for room, compares with the plan, and helps when memory runs out."""
