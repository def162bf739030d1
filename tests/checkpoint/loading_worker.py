"""Runs the checks of `loading_checks` in one group of processes: STORE RANK WORLD CHECKS FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("checkpoint", "strategies", "transformers"))

from check_worker import main

main()
