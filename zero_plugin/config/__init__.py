"""Read, locate, check and overlay configuration; imports no torch."""
