"""Experiment trackers: where a run writes its measurements."""
