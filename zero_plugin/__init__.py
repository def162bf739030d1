"""Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""

__version__ = "0.1.0"
