"""Checkpoints and models of other formats, to and from this package's: piece by piece, without a GPU."""
