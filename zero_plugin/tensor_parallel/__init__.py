"""Tensor parallelism: processes that each hold a part of every layer's weights."""
