"""`zero-plugin doctor`: what is wrong with this machine for a config, and what fixes it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from zero_plugin.cli.doctor_checks.examine import examine
from zero_plugin.cli.output import print_findings
from zero_plugin.launch.flags import document_from_flags


def doctor(
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config_file",
            "--config",
            help="YAML launch config or DeepSpeed JSON; default: launch's.",
            show_default=False,
        ),
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the C++ ops that the config needs; each takes up to a minute or two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine for what the config needs: versions, compilers, op builds, memory, disks, names and ports.

    Each line that is not well ends with the command or the edit that fixes it. Exit code: 1 where something that the
    config needs is wrong.
    """
    document = document_from_flags({} if config_file is None else {"config_file": config_file})
    findings = list(examine(document, os.environ, build=build))
    healthy = all(finding.level != "wrong" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "files": list(document.sources), "findings": [asdict(f) for f in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_findings(findings)
    raise typer.Exit(0 if healthy else 1)
