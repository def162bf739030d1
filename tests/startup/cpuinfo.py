"""Cached py-cpuinfo. DeepSpeed queries the processor's name at every op load, which takes a second each time."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_found = PathFinder.find_spec("cpuinfo", [folder for folder in sys.path if Path(folder) != Path(__file__).parent])
assert _found is not None
assert _found.loader is not None
_real = sys.modules["cpuinfo"] = module_from_spec(_found)  # imports of py-cpuinfo get this module
_found.loader.exec_module(_real)
_answer = _real.get_cpu_info()
_real.get_cpu_info = lambda: dict(_answer)
