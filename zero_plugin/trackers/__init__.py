"""Experiment trackers: where a run writes its measurements, one file for each."""
