"""Launches as a user types them, which are disturbed."""

import sys
from pathlib import Path

from launching import environment, free_port, launch, start

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["environment", "free_port", "launch", "start"]
