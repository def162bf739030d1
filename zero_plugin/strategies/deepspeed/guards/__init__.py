"""Checks beside the step of an engine: one file each, with one promise."""
