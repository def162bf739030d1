"""What one check of the self-test found, how that gets from the workers to the command, and what the test runs by."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from zero_plugin.config.document import Document

_LINKS: Final = "Set NCCL_P2P_DISABLE=1: if it passes then, the links between the GPUs, or ACS in the BIOS, are wrong."
# What runs, in this order, and what to do where it fails.
STEPS: Final = {
    "processes": "Read the error above; `zero-plugin doctor` looks at this machine and names what is missing.",
    "barrier": "Set NCCL_DEBUG=INFO (on CPUs TORCH_DISTRIBUTED_DEBUG=DETAIL) and start again: it tells who waits.",
    "all_reduce": _LINKS,
    "all_gather": _LINKS,
    "broadcast": _LINKS,
    "data loader": "Report it with the output of `zero-plugin env`: every sample must come once.",
    "optimizer step": "Add --mixed_precision no, then --zero_stage 0, to see which part differs; report it.",
    "checkpoint": "If the disk is at fault: zero-plugin test --folder FOLDER; else report it, with `zero-plugin env`.",
    "host and device": "Look at `nvidia-smi -q -d ECC` and `dmesg` for a broken card or slot.",
    "NVMe": "Run `zero-plugin doctor`: it measures the folder, and looks for libaio and the op that reads by it.",
}


class CheckError(Exception):
    """A check ran and found something wrong; the text says what."""


class LeftOut(Exception):  # noqa: N818 - nothing is wrong
    """A check has nothing to do in this run; the text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table.

    Attributes:
        check: a name of `STEPS`.
        status: `begun` is what stays of a check that nobody ended.
        said: what was measured, what is wrong, or why it was left out.
        seconds: how long it took.
        advice: what to do about it, where that is known better than by the check.
    """

    check: str
    status: Literal["begun", "ok", "wrong", "left out"]
    said: str = ""
    seconds: float = 0.0
    advice: str = ""

    @property
    def fix(self) -> str:
        """What to do about it; empty where nothing is wrong."""
        return (self.advice or STEPS[self.check]) if self.status in ("begun", "wrong") else ""


def note(outcome: Outcome, file: Path) -> None:
    """Append an outcome; what was written before a crash stays.

    On another host than the command's the folder is not there: the outcome is then told on standard error.
    """
    if not file.parent.is_dir():
        if outcome.status != "begun":
            sys.stderr.write(f"{outcome.status}: {outcome.check}: {outcome.said}\n")
        return
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(outcome)) + "\n")


def read_outcomes(file: Path) -> list[Outcome]:
    """The last word on each check, in the order of their beginnings; empty where no worker came to its first."""
    if not file.exists():
        return []
    outcomes = [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({outcome.check: outcome for outcome in outcomes}.values())


# The rest is about the user's loop (its batches, schedule and clipping) or writes elsewhere (monitors, profilers).
_KEPT: Final = (
    "zero_optimization",
    "bf16",
    "fp16",
    "aio",
    "data_types",
    "torch_autocast",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_force_ds_cpu_optimizer",
)
_LEFT_OUT: Final = ("dynamo_config", "main_training_function", "max_restarts", "min_machines", "log_dir", "tee")


def document_of_test(document: Document) -> Document:
    """What of a document the self-test's own loop runs by.

    Of the optimizer only the type stays, where it is an Adam: the check compares a step, and a sign (Lion) or a first
    step divided by its own size (Adagrad) would hide a wrong gradient.
    """
    training = document.deepspeed.where(lambda path, _: path[0] in _KEPT)
    kind = document.deepspeed.get("optimizer", "type")
    if kind is not None and str(kind.value).lower() in ("adam", "adamw"):
        training = training.replace({("optimizer", "type"): kind})
    launch = document.launch.where(lambda path, _: path[0] not in _LEFT_OUT)
    return replace(document, launch=launch, deepspeed=training, notes=())
