"""The doctor's line about the TPU: torch_xla, what it would run on, and the command that mends what is wrong."""

from __future__ import annotations

import pytest

from zero_plugin.cli.doctor_machine import check_tpu
from zero_plugin.cli.output import Level

CHIPS = "4 TPU chips on the PCI bus"
MISSING = "a TPU needs torch_xla, which is not installed: pip install 'zero-plugin[tpu]'"


@pytest.mark.parametrize(
    ("seen", "environ", "asked", "problem", "level", "parts"),
    [
        ("", {}, False, MISSING, "ok", ["none"]),
        (CHIPS, {}, False, MISSING, "warning", [CHIPS, "pip install 'zero-plugin[tpu]'"]),
        (CHIPS, {}, True, MISSING, "wrong", ["not installed", "pip install 'zero-plugin[tpu]'"]),
        (CHIPS, {}, True, "", "ok", [CHIPS]),
        ("", {}, True, "", "wrong", ["there is no TPU here", "PJRT_DEVICE=CPU"]),
        ("", {"PJRT_DEVICE": "CPU"}, True, "", "warning", ["PJRT_DEVICE is CPU", "unset PJRT_DEVICE"]),
        ("", {"PJRT_DEVICE": "CUDA"}, True, "", "wrong", ["no TPU here, and PJRT_DEVICE is CUDA"]),
    ],
)
def test_what_is_there_against_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    seen: str,
    environ: dict[str, str],
    asked: bool,
    problem: str,
    level: Level,
    parts: list[str],
) -> None:
    """Wrong only where the configuration asks for a TPU; whatever is not well says what to type."""
    monkeypatch.setattr("zero_plugin.cli.doctor_machine.find_version_problem", lambda: problem)
    found = check_tpu(seen, environ, requested=asked)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")
    for part in parts:
        assert part in f"{found.found}\n{found.fix}"
