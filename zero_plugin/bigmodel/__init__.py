"""Models that no device holds: built without memory, spread over GPUs, host memory and disk, run module by module."""
