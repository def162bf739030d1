"""How a training step runs: DeepSpeed, DDP, XLA or one device."""
