"""The ways in which a training step runs: DeepSpeed, DDP, XLA or one device."""
