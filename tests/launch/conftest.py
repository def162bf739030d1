"""Launches as a user types them."""

from launching import environment, free_port, launch, start

__all__ = ["environment", "free_port", "launch", "start"]
