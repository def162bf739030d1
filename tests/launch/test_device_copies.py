"""A notebook's launch on a TPU, up to the start of the copies. These tests replace torch_xla."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero_plugin.errors import MachineError
from zero_plugin.launch import notebook


def test_a_runtime_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own sentence with things to check appears instead of torch_xla's traceback."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("TPU initialization failed: open(/dev/accel0): Device or resource busy")

    unused = SimpleNamespace(_xla_runtime_is_initialized=lambda: False)
    monkeypatch.setattr(notebook, "import_torch_xla", lambda: SimpleNamespace(_XLAC=unused, launch=fail))
    monkeypatch.setattr(notebook, "_find_threads", lambda threads, *, on_gpus: threads)
    with pytest.raises(MachineError, match=r"runtime does not start .*resource busy\n.*holds? the TPU"):
        notebook._run_on_devices(print, (), 4)
