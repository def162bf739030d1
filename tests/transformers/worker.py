"""Runs the checks of this folder's modules in one group of processes: STORE RANK WORLD MODULES FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path.append(str(Path(__file__).parents[1] / "strategies"))

import transformers  # noqa: F401 - before any Accelerator, as in a script
from check_worker import main

main()
