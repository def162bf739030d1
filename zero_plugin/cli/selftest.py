"""`zero-plugin test`: test the functions that a training needs, on the config's own processes.

The processes run `selftest_worker.py`, which writes the outcome of each check to a file. The command prints them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zero_plugin.cli.launch_flags import typed_flags, with_launch_flags
from zero_plugin.cli.output import Finding, print_findings, print_json
from zero_plugin.config.document import Document
from zero_plugin.distributed.messages import show_messages
from zero_plugin.launch.build import build_spec, fill_from_job
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import look_at_machine

_WORKER: Final = Path(__file__).with_name("selftest_worker.py")
_LINKS: Final = "Set NCCL_P2P_DISABLE=1: if it passes then, the links between the GPUs, or ACS in the BIOS, are wrong."
# The checks in order, and what to do if one fails.
STEPS: Final = {
    "processes": "Read the error above; `zero-plugin doctor` checks this machine and names what is missing.",
    "barrier": "Set NCCL_DEBUG=INFO (on CPUs TORCH_DISTRIBUTED_DEBUG=DETAIL) and start again: it logs who waits.",
    "all_reduce": _LINKS,
    "all_gather": _LINKS,
    "broadcast": _LINKS,
    "shared samples": "Report it with the output of `zero-plugin env`, or write sequence_parallel_size: 1.",
    "data loader": "Report it with the output of `zero-plugin env`: every sample must come once.",
    "optimizer step": "Add --mixed_precision no, then --zero_stage 0, to see which part differs; report it.",
    "checkpoint": "Try another disk: zero-plugin test --folder FOLDER; then report it, with `zero-plugin env`.",
    "host and device": "Look at `nvidia-smi -q -d ECC` and `dmesg` for a broken card or slot.",
    "NVMe": "Run `zero-plugin doctor`: it measures the folder, and checks libaio and the op that uses libaio.",
}


class CheckError(Exception):
    """An error for a failed check. The text names the failure."""


class LeftOut(Exception):  # noqa: N818 - nothing is wrong
    """An exception for a check that has nothing to do in this run. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class Outcome(Finding):
    """The outcome of a check on all processes.

    Attributes:
        seconds: duration of the check.
    """

    seconds: float = 0.0


def begun(check: str) -> Outcome:
    """Return the outcome of a check that has begun (a name of `STEPS`). It stays if the processes die in the check."""
    return Outcome(check, "wrong", "", STEPS[check])


def note(outcome: Outcome, file: Path) -> None:
    """Append an outcome to the file, which keeps earlier outcomes after a crash.

    On other hosts than the command's, the folder does not exist. The outcome then goes to standard error.
    """
    if not file.parent.is_dir():
        if outcome.found:
            sys.stderr.write(f"{outcome.level}: {outcome.check}: {outcome.found}\n")
        return
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(outcome)) + "\n")


def read_outcomes(file: Path) -> list[Outcome]:
    """Return the last outcome of each check, in the order of their start; empty if no worker reached a check."""
    if not file.exists():
        return []
    outcomes = [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({outcome.check: outcome for outcome in outcomes}.values())


# Other keys concern the user's training loop (batches, schedule, clipping) or write to other places (monitors,
# profilers).
_KEPT: Final = (
    *("zero_optimization", "bf16", "fp16", "aio", "data_types", "torch_autocast", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "zero_force_ds_cpu_optimizer", "sequence_parallel_size"),
)
_LEFT_OUT: Final = ("dynamo_config", "main_training_function", "max_restarts", "min_machines", "log_dir", "tee")


def document_of_test(document: Document) -> Document:
    """Return the part of a document that the self-test's own loop uses.

    Of the optimizer section, only an Adam's type stays. The check compares a step, and other optimizers would hide a
    wrong gradient: Lion uses only its sign, and Adagrad divides the first step by the gradient's own size.
    """
    training = document.deepspeed.where(lambda path, _: path[0] in _KEPT)
    kind = document.deepspeed.get("optimizer", "type")
    if kind is not None and str(kind.value).lower() in ("adam", "adamw"):
        training = training.replace({("optimizer", "type"): kind})
    launch = document.launch.where(lambda path, _: path[0] not in _LEFT_OUT)
    return replace(document, launch=launch, deepspeed=training, notes=())


@with_launch_flags("module", "no_python", "model", "sequence_length")  # the program is the self-test's
def selftest(
    ctx: typer.Context,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Folder for the checkpoint; all machines must share it. Default: temporary, on one machine only.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **_: Any,
) -> None:
    """Test collectives, one optimizer step, offload, a checkpoint and a data loader with a config.

    The command accepts the flags of `launch`. It takes well under a minute, unless DeepSpeed has to build ops first.
    Exit code: 1 if a check fails. With several machines, start the command on each.
    """
    flags = typed_flags(ctx)
    endpoint = flags.get("rdzv_endpoint")
    document, _of_job = fill_from_job(document_from_flags(flags), os.environ, endpoint)
    with tempfile.TemporaryDirectory(prefix="zero_plugin_test_", ignore_cleanup_errors=True) as own:
        outcomes = Path(own) / "outcomes"
        checkpoint = "" if folder is None else str(Path(folder).expanduser().absolute() / "zero_plugin_test")
        if folder is None and document.launch.value("num_machines") in (None, 1):
            checkpoint = str(Path(own) / "checkpoint")
        spec = build_spec(
            document_of_test(document),
            Program(str(_WORKER), (str(outcomes), checkpoint)),
            look_at_machine(),
            os.environ,
            rendezvous_endpoint=endpoint,
        )
        if flags.get("dry_run"):
            print(shell_script(spec))
            return
        show_messages(quiet=True, prefix="")
        code = run_workers(spec)
        found = read_outcomes(outcomes)
    if not found and spec.hosts is not None:
        print("this machine is not one of the hosts; their results are above", file=sys.stderr)
        raise typer.Exit(1 if code else 0)
    _show(found or [begun("processes")], code, as_json=as_json)


def _show(outcomes: list[Outcome], code: int, *, as_json: bool) -> None:
    """Print the table or JSON, and exit with 1 if a check failed.

    Raises:
        Exit: always.
    """
    within = f"the processes ended during this check, with exit code {code}; their output is above"
    outcomes = [outcome if outcome.found else replace(outcome, found=within) for outcome in outcomes]
    passed = not code and all(outcome.level != "wrong" for outcome in outcomes)
    if as_json:
        rows = [
            {"check": o.check, "result": o.level, "said": o.found, "fix": o.fix, "seconds": round(o.seconds, 3)}
            for o in outcomes
        ]
        print_json({"passed": passed, "exit_code_of_workers": code, "checks": rows})
    else:
        print_findings(outcomes)
    raise typer.Exit(0 if passed else 1)
