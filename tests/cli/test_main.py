"""The command line itself: commands, speed, and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import run_afresh

import zero_plugin
from zero_plugin.config.read import document_from_mapping
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import Machine

pytestmark = pytest.mark.programs


def run(
    *arguments: str, folder: Path, code: str | None = None, columns: str = "60", **variables: str
) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "zero_plugin"]
    return run_afresh(*start, *arguments, cwd=folder, **{"HF_HOME": str(folder), "COLUMNS": columns, **variables})


def test_version(tmp_path: Path) -> None:
    """`--version` prints the package's version."""
    assert run("--version", folder=tmp_path).stdout.strip() == zero_plugin.__version__


def test_help_lists_every_command(tmp_path: Path) -> None:
    """`--help` lists the commands with their first line."""
    done = run("--help", folder=tmp_path)
    assert done.returncode == 0
    for command in ("launch", "check", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["lanch"], "Did you mean launch?"),
        (["checkpoint", "verfy"], "Did you mean verify?"),
        (["x"], "'x'."),
        (["launch", "--zero_stag", "2", "a.py"], "--zero_stage"),
        (["launch"], "launch [OPTIONS] SCRIPT"),
        (["plan", "nodir"], "nodir is neither a file"),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2(arguments: list[str], part: str, tmp_path: Path) -> None:
    """An unknown command, an unknown flag (with the likely one) and a missing script are usage errors."""
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["launch", "demo", "test", "explain"])
def test_all_launch_flags_are_a_further_help(command: str, tmp_path: Path) -> None:
    """`--help` lists the usual flags in few lines. `--help-all` lists all, with no name cut at 60 columns."""
    short, complete = (run(command, flag, folder=tmp_path).stdout for flag in ("--help", "--help-all"))
    assert "--num_processes INT" in short
    assert "--machine_rank" not in short
    assert len(short.splitlines()) < 100 < len(complete.splitlines())
    for flag in ("--num_processes INT", "--dynamo_use_regional_compilation\n", "--deepspeed_moe_layer_cls_names TEXT"):
        assert flag in complete


def test_a_shell_completes_commands_and_flags(tmp_path: Path) -> None:
    """A shell completes all flags, also those that `--help` omits."""
    code = "from zero_plugin.cli.main import main; main()"
    words = {"zero-plugin la": ["launch"], "zero-plugin launch --machine": ["--machine_rank"]}
    for typed, wanted in words.items():
        asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_ZERO_PLUGIN_COMPLETE": "complete_bash"}
        lines = [f"import os; os.environ.update({asked!r})", code]
        assert run(folder=tmp_path, code="; ".join(lines)).stdout.split() == wanted


@pytest.mark.parametrize("flag", ["--zero_stage", "--zero-stage"])
@pytest.mark.parametrize("join", ["=", " "])
def test_flags_take_dash_and_underscore(flag: str, join: str, tmp_path: Path) -> None:
    """Dash and underscore spellings, with `=` or a blank, mean the same."""
    (tmp_path / "a.py").write_text("")
    done = run("launch", *f"{flag}{join}3".split(), "--dry-run", "a.py", folder=tmp_path)
    assert '["zero_optimization","stage"],3,"flag","--zero_stage"' in done.stdout


def test_an_error_is_one_screen_and_its_lines_stay_whole(tmp_path: Path) -> None:
    """An error has exit code 2 and no traceback. A long path stays on one line on a narrow terminal, to be copied."""
    path = tmp_path / ("folder-" * 12) / "none.yaml"
    done = run("launch", "--config_file", str(path), "a.py", folder=tmp_path)
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 24
    assert done.stdout == ""


@pytest.mark.parametrize("columns", ["0", "1"])
def test_an_error_is_printed_whatever_the_columns(columns: str, tmp_path: Path) -> None:
    """With an unknown terminal size (`COLUMNS=0`) an error is printed. On a tiny terminal its lines stay whole."""
    done = run("launch", "absent.py", folder=tmp_path, columns=columns)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 1 problem in the configuration:\n  command line: absent.py is not a file\n")


def test_standard_output_that_cannot_write_every_character(tmp_path: Path) -> None:
    """If the locale's encoding lacks the table's arrows, only these are replaced."""
    done = run("plan", "--params", "1B", "--gpu", "A100-80GB", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "? DDP" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    """`check` works and returns its own exit code if a daemon or shell has closed standard streams."""
    (tmp_path / "bad.yaml").write_text("mixed_precison: bf16\n")
    command = f'"{sys.executable}" -m zero_plugin check bad.yaml {closed}'
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=60).returncode == 2


OPENED = """
import os
null = os.stat(os.devnull).st_rdev
open("opened", "wb").write(bytes(os.fstat(number).st_rdev == null for number in range(3)))
"""


@pytest.mark.processes
def test_a_launch_with_closed_standard_streams(tmp_path: Path) -> None:
    """Workers start with the null device as standard streams, so C++ output reaches none of their files."""
    (tmp_path / "a.py").write_text(OPENED)
    command = f'"{sys.executable}" -m zero_plugin launch --cpu --num_processes 1 a.py <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=120).returncode == 0
    assert (tmp_path / "opened").read_bytes() == b"\1\1\1"


IMPORTED = """
import sys
from zero_plugin.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"torch", "deepspeed", "numpy"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else end.code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["launch", "--help"], 0),
        (["--help"], 0),
        (["check", "bad.yaml"], 2),
        (["launch", "--config_file", "bad.yaml", "a.py"], 2),
        (["launch", "--zero_stage", "4", "a.py"], 2),
        (["launch", "--num_processes", "2", "absent.py"], 2),
        (["launch", "--cpu", "--dry_run", "a.py"], 0),
    ],
    ids=str,
)
def test_errors_and_help_import_no_torch(arguments: list[str], code: int, tmp_path: Path) -> None:
    """All errors are found before torch is imported. benchmarks/errors.py has the times."""
    (tmp_path / "a.py").write_text("")
    (tmp_path / "bad.yaml").write_text("mixed_precison: bf16\ndeepspeed_config: {zero_stage: 4}\n")
    done = run(*arguments, folder=tmp_path, code=IMPORTED)
    assert done.returncode == code, done.stderr


WRONG = {
    "a missing file": ("absent.yaml", None, "absent.yaml", "no such file"),
    "broken JSON": ("bad.json", '{\n  "train_batch_size": 8', "bad.json:2:", "`}` is expected"),
    "an unknown key": ("bad.yaml", "num_processes: 2\nmixed_precison: bf16\n", "bad.yaml:2:1", "mixed_precision"),
    "a wrong type": ("bad.json", '{\n  "train_batch_size": "two"}', "bad.json:2:3", "integer"),
    "stage 4": ("bad.json", '{"zero_optimization":\n  {"stage": 4}}', "bad.json:2:4", "an integer from 0 to 3"),
    "offload_param at stage 2": (
        "bad.json",
        '{"zero_optimization": {"stage": 2,\n  "offload_param": {"device": "cpu"}}}',
        "bad.json:2:",
        "stage 3",
    ),
    "nvme without a path": (
        "bad.json",
        '{"zero_optimization": {"stage": 3,\n  "offload_optimizer": {"device": "nvme"}}}',
        "bad.json:2:",
        "nvme_path",
    ),
    "an auto that nothing fills": (
        "bad.json",
        '{"zero_optimization": {"stage": 3,\n  "offload_optimizer": {"device": "nvme",\n  "nvme_path": "auto"}}}',
        "bad.json:3:3",
        "Write a folder",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_starts_no_worker(wrong: str, tmp_path: Path) -> None:
    """Bad input prints file, line and legal values, with exit code 2. No script runs, and torch is not imported."""
    name, content, where, legal = WRONG[wrong]
    (tmp_path / "a.py").write_text("open('ran', 'w')")
    if content is not None:
        (tmp_path / name).write_text(content)
    done = run("launch", "--config_file", name, "--num_processes", "2", "a.py", folder=tmp_path, code=IMPORTED)
    assert done.returncode == 2, done.stderr
    told = done.stderr.replace("\n", " ")
    assert where in told
    assert legal in told
    assert "Traceback" not in told
    assert len(done.stderr.splitlines()) < 24
    assert not (tmp_path / "ran").exists()


def test_a_default_file_is_named(tmp_path: Path) -> None:
    """A default file that the command line does not name is mentioned."""
    default = tmp_path / "zero_plugin" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("num_processes: 1\n")
    (tmp_path / "a.py").write_text("")
    done = run("launch", "--dry_run", "a.py", folder=tmp_path)
    assert str(default) in done.stderr


RESTARTED = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
open("ran", "w")
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
total = torch.ones(1)
dist.all_reduce(total)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
os.write(1, f"{sys.argv[1]} {os.environ['OMP_NUM_THREADS']} {total.tolist()}\\n".encode())
dist.destroy_process_group()
"""


def test_dry_run_leaves_the_encoded_configuration_out_for_a_terminal(tmp_path: Path) -> None:
    """A person knows the configuration; a pipe, and `--verbose`, get all of it."""
    (tmp_path / "a.py").write_text("")
    spec = build_spec(
        document_from_mapping({"num_processes": 1, "use_cpu": True}, "test"),
        Program(str(tmp_path / "a.py")),
        Machine(0, 2),
        {},
    )
    assert "export ZERO_PLUGIN_DOCUMENT=…" in shell_script(spec, with_document=False)
    assert "export ZERO_PLUGIN_DOCUMENT='{" in shell_script(spec)
    assert "ZERO_PLUGIN_DOCUMENT='{" in run("launch", "--cpu", "--dry_run", "a.py", folder=tmp_path).stdout


@pytest.mark.processes
def test_dry_run_prints_a_script_that_does_the_launch(tmp_path: Path, lines_of: Callable[..., Iterator[str]]) -> None:
    """`--dry_run` starts nothing. Its output, run by a shell, runs the script in the same environment and restarts."""
    (tmp_path / "a.py").write_text(RESTARTED)
    arguments = ["launch", "--cpu", "--num_cpu_threads_per_process", "3", "--num_processes", "2", "--max_restarts", "1"]
    done = run(*arguments, "--monitor_interval", "0.2", "--dry_run", "a.py", "it's $HOME", folder=tmp_path)
    assert done.returncode == 0
    assert not (tmp_path / "ran").exists()
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("python -m zero_plugin.launch.rendezvous --nnodes=1 --nproc-per-node=2")
    assert " --monitor-interval=0.2 " in lines[-1]
    assert all(line.startswith(("#", "export ")) for line in lines[:-1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.run(
        ["sh", "-c", done.stdout],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert list(lines_of(shell.stdout.splitlines())) == ["it's $HOME 3 [2.0]"] * 2, shell.stderr
