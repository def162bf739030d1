"""`zero-plugin test`: try on the config's own processes what a training needs, before it is trained."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zero_plugin.cli import selftest_checks as package
from zero_plugin.cli.doctor_checks.finding import Finding
from zero_plugin.cli.flags import typed_flags, with_launch_flags
from zero_plugin.cli.output import print_findings
from zero_plugin.cli.selftest_checks.outcome import Outcome, document_of_test, read_outcomes
from zero_plugin.distributed.messages import show_messages
from zero_plugin.launch.build import build_spec, fill_from_job
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import look_at_machine

_WORKER: Final = Path(package.__file__).parent / "worker.py"


@with_launch_flags("module", "no_python", "model", "sequence_length")  # the program is the self-test's
def selftest(
    ctx: typer.Context,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            help="Where the checkpoint is tried; all machines must see it. Default: a temporary one of one machine.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **_: Any,
) -> None:
    """Try collectives, one optimizer step, offload, a checkpoint and a data loader, as the config says.

    Launch flags change how it runs, as with `launch`. It takes well under a minute, unless DeepSpeed has ops to build
    first. Exit code: 1 where something fails. With several machines, start it on each.
    """
    flags = typed_flags(ctx)
    endpoint = flags.get("rdzv_endpoint")
    document, _of_job = fill_from_job(document_from_flags(flags), os.environ, endpoint)
    with tempfile.TemporaryDirectory(prefix="zero_plugin_test_", ignore_cleanup_errors=True) as own:
        outcomes = Path(own) / "outcomes"
        checkpoint = _checkpoint_folder(folder, own, alone=document.launch.value("num_machines") in (None, 1))
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
        print("this machine is none of the hosts; their results are above", file=sys.stderr)
        raise typer.Exit(1 if code else 0)
    _show(found or [Outcome("processes", "begun")], code, as_json=as_json)


def _checkpoint_folder(typed: str | None, own: str, *, alone: bool) -> str:
    if typed is not None:
        return str(Path(typed).expanduser().absolute() / "zero_plugin_test")
    return str(Path(own) / "checkpoint") if alone else ""


def _show(outcomes: list[Outcome], code: int, *, as_json: bool) -> None:
    """Print the table or JSON, and exit with 1 where something failed.

    Raises:
        Exit: always.
    """
    findings = [_finding(outcome, code) for outcome in outcomes]
    passed = not code and all(finding.level != "wrong" for finding in findings)
    if as_json:
        rows = [
            {"check": f.check, "result": f.level, "said": f.found, "fix": f.fix, "seconds": round(o.seconds, 3)}
            for f, o in zip(findings, outcomes, strict=True)
        ]
        print(
            json.dumps({"passed": passed, "exit_code_of_workers": code, "checks": rows}, indent=2, ensure_ascii=False)
        )
    else:
        print_findings(findings)
    raise typer.Exit(0 if passed else 1)


def _finding(outcome: Outcome, code: int) -> Finding:
    if outcome.status == "begun":
        said = f"the processes ended within it, with exit code {code}; their own words are above"
        return Finding(outcome.check, "wrong", said, outcome.fix)
    return Finding(outcome.check, outcome.status, outcome.said, outcome.fix)
