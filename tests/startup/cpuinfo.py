"""py-cpuinfo, which DeepSpeed asks for the processor's name whenever it loads an op, a second each time: asked once."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_found = PathFinder.find_spec("cpuinfo", [folder for folder in sys.path if Path(folder) != Path(__file__).parent])
assert _found is not None
assert _found.loader is not None
_real = sys.modules["cpuinfo"] = module_from_spec(_found)  # whoever imports this gets that
_found.loader.exec_module(_real)
_answer = _real.get_cpu_info()
_real.get_cpu_info = lambda: dict(_answer)
