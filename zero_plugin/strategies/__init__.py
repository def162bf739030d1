"""How a training step runs: DeepSpeed, DDP or one device."""
