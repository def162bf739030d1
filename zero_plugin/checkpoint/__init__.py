"""Weights and checkpoints as whole logical tensors in safetensors."""
