"""Arithmetic for the memory and time of every stage and offload, and the search for the fastest setup that fits."""
