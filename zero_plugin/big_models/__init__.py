"""Models that no device holds: spread over GPUs, CPU memory and disk, and run module by module."""
