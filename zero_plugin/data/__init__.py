"""Sharded loaders and exact gathering."""
