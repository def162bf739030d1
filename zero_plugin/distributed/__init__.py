"""Process group, collectives, and the check that all ranks make the same calls."""
