"""Runs models that are too large for one device: spread over GPUs, CPU memory and disk, module by module."""
