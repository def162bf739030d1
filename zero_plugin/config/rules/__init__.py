"""Contradictions by topic: values that are legal one by one and cannot hold together."""
