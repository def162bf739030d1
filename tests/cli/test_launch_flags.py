"""Accelerate's flags, supported or refused, and flags after the script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from zero_plugin.cli.launch_flags import launch_flags, refuse_flag


def test_every_flag_of_accelerate_is_taken_or_refused_by_name() -> None:
    """`launch` has every flag of Accelerate, or says what to write instead."""
    spellings = [flag for action in launch_command_parser()._actions for flag in action.option_strings]
    theirs = {flag[:2] + flag[2:].replace("-", "_") for flag in spellings}
    options = [flag.__metadata__[0] for flag in launch_flags().values()]
    ours = {"--help", "-h"}.union(*((option.default, *option.param_decls) for option in options))
    assert len(theirs) > 100
    refused = {flag: refuse_flag(flag) for flag in theirs - ours}
    assert [flag for flag, problem in refused.items() if problem is None or not problem.fix] == []


def test_a_flag_of_nobody_is_left_to_the_usual_message() -> None:
    """Typing errors, and names that only contain the name of a family, get the usual message."""
    assert refuse_flag("--num_procesess") is None
    assert refuse_flag("--my_fsdp_") is None
    assert refuse_flag("") is None


@pytest.mark.parametrize(
    "typed",
    ["--nproc-per-node", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--num_gpus", "--hostfile"],
)
def test_a_flag_of_another_launcher_names_this_commands(typed: str) -> None:
    """For a flag of torchrun or DeepSpeed's launcher, the message names a flag that `launch` has."""
    problem = refuse_flag(typed)
    assert problem is not None
    named = re.search(r"--(\w+)", problem.fix)
    assert named is not None
    assert named[1] in launch_flags()


def test_dashes_and_a_single_dash_are_the_same_name() -> None:
    """A flag with dashes or a single dash is named with underscores."""
    problem = refuse_flag("--fsdp-sharding-strategy")
    assert problem is not None
    assert problem.headline == "--fsdp_sharding_strategy: this flag of Accelerate's is not supported"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print(1)", ["--config_file", "--num-processes"]),
        ("parser.add_argument('--num_processes')", ["--config_file"]),
        ("HfArgumentParser(Arguments)", []),
    ],
)
def test_launch_flags_after_the_script_are_told(text: str, told: list[str], tmp_path: Path) -> None:
    """A launch flag after the script gives a warning, unless the script's text has it or it is the script's own."""
    script = tmp_path / "train.py"
    script.write_text(text)
    arguments = ["--cpu", "--dry_run", str(script), "--config_file", "X", "--num-processes=3", "--mine", "--lr", "2"]
    launch = [sys.executable, "-m", "zero_plugin", "launch", *arguments]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "after" in line]
    assert lines == [
        f"warning: {flag} is after {script}, so the flag is passed to the script, whose text does not contain the "
        "flag. If the flag is meant for `launch`, write it before the script."
        for flag in told
    ]
