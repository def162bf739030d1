"""A notebook's launch on a TPU, up to where torch_xla, which these tests stand in for, starts the copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zero_plugin.errors import MachineError
from zero_plugin.launch import notebook


def test_a_runtime_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence as where the launcher starts it, with what to look at, in place of torch_xla's traceback."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("TPU initialization failed: open(/dev/accel0): Device or resource busy")

    unused = SimpleNamespace(_xla_runtime_is_initialized=lambda: False)
    monkeypatch.setattr(notebook, "import_torch_xla", lambda: SimpleNamespace(_XLAC=unused, launch=fail))
    monkeypatch.setattr(notebook, "_find_threads", lambda threads, *, on_gpus: threads)
    with pytest.raises(MachineError, match=r"runtime does not start .*resource busy\n.*holds? the TPU"):
        notebook._run_on_devices(print, (), 4)
