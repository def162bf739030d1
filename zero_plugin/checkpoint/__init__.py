"""Weights and checkpoints as unpartitioned logical tensors in safetensors."""
