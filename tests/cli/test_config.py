"""`zero-plugin config`, answered by a person or a script."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.cli.config import ask_launch_config
from zero_plugin.cli.prompts import Prompts
from zero_plugin.config.check import find_problems
from zero_plugin.config.commented import key_comments
from zero_plugin.config.read import read_document
from zero_plugin.machine.hardware import Machine

pytestmark = pytest.mark.programs

SHARED = Path(__file__).resolve().parents[3] / "shared" / "configs"


def run(*arguments: str, folder: Path, answers: str = "") -> subprocess.CompletedProcess[str]:
    """Run `zero-plugin config …` with answers in a pipe, one a line. "" takes the default."""
    return subprocess.run(
        [sys.executable, "-m", "zero_plugin", "config", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder / "home")},
        input=answers,
        capture_output=True,
        text=True,
        timeout=60,
    )


def lines(*answers: object) -> str:
    return "".join(f"{answer}\n" for answer in answers)


KEYS = {"up": "\x1b[A", "down": "\x1b[B", "enter": "\r", "ctrl-c": "\x03", "ctrl-d": "\x04"}


def wait_until_it_reads(pid: int) -> None:
    """Wait until the program reads. Python loses a signal between the prompt's output and the start of the read."""
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S" and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)


class Terminal:
    """A person at a terminal, who waits for a question and presses keys. Every call ends within a minute."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self.shown = ""
        self._read = 0
        self._deadline = time.monotonic() + 60
        # Without this, prompt_toolkit asks the terminal for the cursor position, and no terminal answers here.
        extra = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "HF_HOME": str(folder / "home"), **environment}
        self._own_end, end = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **extra},
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # to make Ctrl-C a signal
        )
        os.close(end)

    def answer(self, question: str, *keys: str) -> None:
        """Wait until `question` appears after the previous answers, then press keys."""
        while question not in self.shown[self._read :]:
            assert self._more(), f"{question!r} was not asked:\n{self.shown}"
        self._read = self.shown.index(question, self._read) + len(question)
        for key in keys:
            if key == "ctrl-c":
                wait_until_it_reads(self.process.pid)
            os.write(self._own_end, KEYS.get(key, key).encode())

    def end(self) -> int:
        """Return the exit code after all output is read."""
        while self._more():
            pass
        return self.process.wait(timeout=10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own_end)

    def _more(self) -> bool:
        ready, _, _ = select.select([self._own_end], [], [], max(0, self._deadline - time.monotonic()))
        try:
            data = os.read(self._own_end, 65536) if ready else b""
        except OSError:  # the other end is closed
            data = b""
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, **environment: str) -> Terminal:
        opened.append(Terminal([sys.executable, "-m", "zero_plugin", "config", *arguments], tmp_path, **environment))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def written(file: Path) -> dict[str, Any]:
    """Return the values of a written config. The check must pass, and each key must have a comment."""
    assert find_problems(read_document(file)) == []
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    sections = ("deepspeed_config", "dynamo_config")
    paths = [*((key,) for key in values), *((name, key) for name in sections for key in values.get(name, {}))]
    assert [path for path in paths if f"# {key_comments()[path]}\n" not in file.read_text()] == []
    return values


# Answers by number ("" takes the default), and the resulting values.
PIPED = {
    "cpu": (
        ["cpu", "", "", "", "", ""],
        {
            "distributed_type": "NO",
            "mixed_precision": "no",
            "num_processes": 1,
            "use_cpu": True,
        },
    ),
    "cpu, several processes": (
        [2, "", 2, 1, "no", ""],
        {
            "distributed_type": "MULTI_CPU",
            "mixed_precision": "no",
            "num_processes": 2,
            "use_cpu": True,
        },
    ),
    "ddp": (
        [1, "", "0,2", 2, 1, 2, "y", "logs", 3, 1, "y", 2, 3, "y"],
        {
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "bf16",
            "num_processes": 2,
            "gpu_ids": "0,2",
            "num_cpu_threads_per_process": 3,
            "max_restarts": 1,
            "log_dir": "logs",
            "debug": True,
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR",
                "dynamo_mode": "max-autotune",
                "dynamo_use_regional_compilation": True,
            },
        },
    ),
    "stage 2": (
        [1, 1, "all", 4, 2, "no", 2, 2, 8, 0.5, 3, "no"],
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "fp16",
            "num_processes": 4,
            "deepspeed_config": {
                "zero_stage": 2,
                "offload_optimizer_device": "cpu",
                "gradient_accumulation_steps": 8,
                "gradient_clipping": 0.5,
            },
        },
    ),
    "one process, stage 1": (
        [1, "", "", 1, "deepspeed", "", 1, "", "", "", "", ""],
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "no",
            "num_processes": 1,
            "deepspeed_config": {
                "zero_stage": 1,
                "offload_optimizer_device": "none",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            },
        },
    ),
    "several machines": (
        [1, 2, "", 8, "", "", 0, "", "", "", 1, 1, "10.0.0.1", 29501, 2, ""],
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29501,
            "rdzv_backend": "static",
            "deepspeed_config": {
                "zero_stage": 0,
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "deepspeed_multinode_launcher": "standard",
            },
        },
    ),
    "machines that number themselves, ddp": (
        [1, 3, "", 6, 1, 2, "node-0", "", 2, ""],
        {
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "bf16",
            "num_processes": 6,
            "num_machines": 3,
            "main_process_ip": "node-0",
            "main_process_port": 29500,
            "rdzv_backend": "c10d",
        },
    ),
    "hostfile": (
        [1, 2, "", 4, 2, "", 2, "", "", "", 2, "/job/hosts", 3, "host-2", "", ""],
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "no",
            "num_processes": 4,
            "num_machines": 2,
            "deepspeed_config": {
                "zero_stage": 2,
                "offload_optimizer_device": "none",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "deepspeed_multinode_launcher": "pdsh",
                "deepspeed_hostfile": "/job/hosts",
                "deepspeed_exclusion_filter": "host-2",
            },
        },
    ),
    "tpu": (
        [3, "", 8, 2, "", ""],
        {
            "distributed_type": "XLA",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "main_training_function": "main",
        },
    ),
}


@pytest.mark.parametrize("name", PIPED)
def test_answers_through_a_pipe(name: str, tmp_path: Path) -> None:
    """Without a terminal the questions are plain text. Every answer is used, and no question lacks an answer."""
    answers, expected = PIPED[name]
    done = run(folder=tmp_path, answers=lines(*answers))
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "home" / "zero_plugin" / "default_config.yaml"
    assert written(file) == expected
    assert f"written: {file}\nrun it:  zero-plugin launch train.py\n" in done.stdout
    short = run("--config_file", "short.yaml", folder=tmp_path, answers=lines(*answers[:-1]))
    assert short.returncode == 1
    assert "input ended" in short.stderr
    assert not (tmp_path / "short.yaml").exists()


def test_stage_2_with_arrow_keys(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Arrow keys move in a menu. Enter takes the marked choice, or the default of a line."""
    person = terminal("--config_file", "mine.yaml")
    person.answer("Which device trains the model?", "up", "enter")
    person.answer("How many machines?", "enter")
    person.answer("Which GPUs", "enter")
    person.answer("How many processes?", "2", "enter")
    person.answer("Which strategy?", "enter")
    person.answer("DeepSpeed JSON", "n")
    person.answer("Which ZeRO stage?", "enter")
    person.answer("offload optimizer states?", "down", "enter")
    person.answer("micro-batches", "4", "enter")
    person.answer("clip gradients?", "-1", "enter")
    person.answer("Type a number of at least 0", "\x7f", "\x7f", "1", "enter")
    person.answer("Mixed precision?", "down", "enter")
    person.answer("rarer", "n")
    assert person.end() == 0
    assert "zero-plugin launch --config_file mine.yaml" in person.shown
    assert written(tmp_path / "mine.yaml") == {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 2,
        "deepspeed_config": {
            "zero_stage": 2,
            "offload_optimizer_device": "cpu",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
        },
    }


def test_stage_3_on_nvme_with_arrow_keys(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Stage 3 asks about NVMe, weights and saving. The second folder's default is the first folder."""
    person = terminal()
    person.answer("Which device trains the model?", "up", "enter")
    person.answer("How many machines?", "enter")
    person.answer("Which GPUs", "0,1", "enter")
    person.answer("How many processes? [2]", "enter")
    person.answer("Which strategy?", "enter")
    person.answer("DeepSpeed JSON", "n")
    person.answer("Which ZeRO stage?", "down", "enter")
    person.answer("offload optimizer states?", "up", "enter")
    person.answer("optimizer states:", "enter")
    person.answer("Type a name or a path", "/nvme/a b", "enter")
    person.answer("offload weights?", "down", "down", "enter")
    person.answer("weights: [/nvme/a b]", "enter")
    person.answer("unpartitioned 16-bit", "enter")
    person.answer("micro-batches", "enter")
    person.answer("clip gradients?", "enter")
    person.answer("partitioned models in", "enter")
    person.answer("mixture-of-experts", "n")
    person.answer("Mixed precision?", "down", "enter")
    person.answer("rarer", "enter")
    assert person.end() == 0
    assert written(tmp_path / "home" / "zero_plugin" / "default_config.yaml") == {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 2,
        "gpu_ids": "0,1",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_optimizer_device": "nvme",
            "offload_optimizer_nvme_path": "/nvme/a b",
            "offload_param_device": "nvme",
            "offload_param_nvme_path": "/nvme/a b",
            "zero3_save_16bit_model": True,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    }


def test_a_terminal_without_a_cursor_gets_numbered_lists(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """TERM=dumb gets numbered lists instead of menus, and a wrong answer is asked for again."""
    person = terminal(TERM="dumb")
    person.answer("  2) CPU", "7\n")
    person.answer("Type a number: 1, 2, 3.", "2\n")
    for question in ("machines?", "processes?", "Which strategy?", "Mixed precision?", "rarer"):
        person.answer(question, "\n")
    assert person.end() == 0
    assert written(tmp_path / "home" / "zero_plugin" / "default_config.yaml")["distributed_type"] == "NO"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize(("key", "code"), [("ctrl-c", 130), ("ctrl-d", 1)])
def test_stopping_leaves_nothing(
    term: str, key: str, code: int, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    """Ctrl-C in a menu or a line exits with 130, without traceback and without a partial file."""
    person = terminal(TERM=term)
    person.answer("Which device trains the model?", "enter")
    person.answer("How many machines?", key)
    assert person.end() == code
    assert "Traceback" not in person.shown
    assert "Aborted" not in person.shown
    assert not (tmp_path / "home").exists()


def test_ctrl_c_in_a_menu(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Ctrl-C exits silently while a menu is on the screen."""
    person = terminal()
    person.answer("TPU", "ctrl-c")
    assert person.end() == 130
    assert "error" not in person.shown.lower()


def test_the_signal_is_as_quiet_as_the_key(tmp_path: Path) -> None:
    """SIGINT exits silently while the process waits for a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "zero_plugin", "config"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "CPU" not in process.stdout.readline():
        pass
    wait_until_it_reads(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_after_a_yes(tmp_path: Path) -> None:
    """Replacing a file needs a yes before the questions, also with --default. Any other answer keeps the file."""
    file = tmp_path / "mine.yaml"
    for answers in ("", "n\n", "\n"):
        for flags in ([], ["--default"]):
            file.write_text("old")
            done = run("--config_file", "mine.yaml", *flags, folder=tmp_path, answers=answers)
            assert done.returncode == 1
            assert "mine.yaml exists. Replace it? [no]" in done.stdout
            assert "Which device" not in done.stdout
            assert file.read_text() == "old"
    assert run("--config_file", "mine.yaml", "--default", folder=tmp_path, answers="y\n").returncode == 0
    assert "scheduler_counts" not in written(file)  # a scheduler built from the loader before prepare() ends with it
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_default_asks_nothing(tmp_path: Path) -> None:
    """`--default` writes this machine's default file. `launch` without a file uses it and names it."""
    done = run("--default", folder=tmp_path)
    file = tmp_path / "home" / "zero_plugin" / "default_config.yaml"
    assert done.stdout == f"written: {file}\nrun it:  zero-plugin launch train.py\n"
    assert written(file)["num_processes"] >= 1
    (tmp_path / "train.py").touch()
    launch = subprocess.run(
        [sys.executable, "-m", "zero_plugin", "launch", "--dry_run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launch.returncode == 0
    assert launch.stderr == f"configuration: {file}\n"


@pytest.mark.parametrize(
    ("place", "why"),
    [("folder", "it is a folder"), ("file/below.yaml", "file is no folder that can be written")],
)
def test_a_place_that_cannot_be_written_is_said_before_the_questions(place: str, why: str, tmp_path: Path) -> None:
    """A path that cannot be written is reported before the questions, not after."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    done = run("--config_file", place, folder=tmp_path)
    assert done.returncode == 2
    assert f"--config_file: {place} cannot be written: {why}\n" in done.stderr
    assert done.stdout == ""


def test_a_deepspeed_json_answers_the_rest(tmp_path: Path) -> None:
    """Precision and stage of a DeepSpeed JSON are not asked for. A file with problems is refused immediately."""
    (tmp_path / "bad.json").write_text('{"zero_optimisation": {"stage": 2}}')
    (tmp_path / "launch.yaml").write_text("num_processes: 2\n")
    good = tmp_path / "good.json"
    good.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    answers = lines(1, "", "", 2, 2, "y", "bad.json", "launch.yaml", "gone.json", "good.json", "", "", "")
    done = run("--config_file", "away/mine.yaml", folder=tmp_path, answers=answers)
    assert done.returncode == 0, done.stdout + done.stderr
    for complaint in ("zero_optimization?", "is a launch config", "no such file"):
        assert complaint in done.stdout
    assert written(tmp_path / "away" / "mine.yaml") == {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": str(good)},
    }
    good.write_text('{"zero_optimization": {"stage": 3}}')
    answers = lines(1, "", "", 2, 2, "y", "good.json", "n", "y", "Experts,Router", 2, "")
    done = run("--config_file", "again.yaml", folder=tmp_path, answers=answers)
    assert done.returncode == 0, done.stdout + done.stderr
    values = yaml.safe_load((tmp_path / "again.yaml").read_text())
    assert values["mixed_precision"] == "bf16"
    assert values["deepspeed_config"]["zero3_init_flag"] is False
    assert values["deepspeed_config"]["deepspeed_moe_layer_cls_names"] == "Experts,Router"


@pytest.mark.parametrize("junk", ["x", "-1", "1.5", "²", "9" * 30, "0"])
def test_wrong_answers_are_asked_again(junk: str, tmp_path: Path) -> None:
    """A count that is not a number gets its reason and another try."""
    done = run("--config_file", "a.yaml", folder=tmp_path, answers=lines(2, junk, "", junk, "", "", "", ""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Type a whole number of at least 1.") == 2


def test_what_was_found_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs, Enter alone gives ZeRO-2 on all GPUs in their best precision."""
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert ask_launch_config(Prompts(), Machine(gpus=4, cores=8), "bf16") == {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 4,
        "deepspeed_config": {
            "zero_stage": 2,
            "offload_optimizer_device": "none",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    }


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published configuration files are not beside this checkout")
def test_update_of_a_file_that_accelerate_wrote(tmp_path: Path) -> None:
    """Updating Accelerate's file keeps its meaning, adds comments, drops no-effect keys, and keeps the old file."""
    old = (SHARED / "trl" / "examples__accelerate_configs__deepspeed_zero3.yaml").read_text()
    file = tmp_path / "zero3.yaml"
    file.write_text(old)
    done = run("--update", "zero3.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    before = yaml.safe_load(old)
    dropped = {key for key in before if key.startswith("tpu_")} | {"downcast_bf16"}
    assert yaml.safe_load(file.read_text()) == {key: value for key, value in before.items() if key not in dropped}
    assert (tmp_path / "zero3.yaml.bak").read_text() == old
    assert "zero3.yaml.bak" in done.stdout
    again = run("--update", "zero3.yaml", folder=tmp_path)
    assert again.stdout == "zero3.yaml: nothing to change\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zero3.yaml", "zero3.yaml.bak"]


def test_update_refuses_what_the_check_refuses(tmp_path: Path) -> None:
    """--update refuses what the check refuses and changes nothing. It takes no other option."""
    file = tmp_path / "bad.yaml"
    file.write_text("num_proceses: 2\n")
    done = run("--update", "bad.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert "Did you mean num_processes?" in done.stderr
    assert file.read_text() == "num_proceses: 2\n"
    assert len(list(tmp_path.iterdir())) == 1
    assert "contradicts --default" in run("--update", "bad.yaml", "--default", folder=tmp_path).stderr
