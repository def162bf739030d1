"""Runs this folder's checks in one group of processes, as tests/strategies/check_worker.py does: the same arguments."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "strategies")]

from check_worker import main  # noqa: E402

if __name__ == "__main__":
    main()
