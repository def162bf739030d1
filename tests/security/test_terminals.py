"""Terminal control characters in names, keys and values of foreign files are escaped by every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.cli.output import print_line, print_rows
from zero_plugin.distributed.messages import show_messages
from zero_plugin.errors import CheckpointError, ConfigError, Problem, printable

# Clears the screen, writes into the title, reverses the direction of a text, ends a line, and is half a character.
MARKS = ("\x1b[2J", "\x9d0;title\x07", "\u202e", "\u2066", "\u2028", "\r", "\x7f")
NASTY = "".join(MARKS)


def assert_clean(output: str) -> None:
    assert not [mark for mark in MARKS if mark in output], repr(output)
    assert "\\u001b[2J" in output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["check", "{name}"], 2),
        (["check", "{name}", "--format", "json"], 2),
        (["check", "{name}", "--format", "github"], 2),
        (["check", "."], 2),
        (["check", "no{name}"], 2),
        (["explain", "{name}"], 2),
        (["explain", "right{name}", "--world_size", "2"], 0),
        (["explain", "right{name}", "--world_size", "2", "--format", "json"], 0),
        (["launch", "--config_file", "{name}", "train.py"], 2),
        (["launch", "--config_file", "right{name}", "--dry_run", "train{name}.py"], 0),
        (["launch", "--cpu", "--num_processes", "1", "no{name}.py"], 2),
        (["checkpoint", "inspect", "{name}"], 2),
        (["plan", "no{name}"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_command_steers_the_terminal(arguments: list[str], code: int, tmp_path: Path) -> None:
    """Names and contents of a wrong and a right file are escaped by every command."""
    name = f"{NASTY}.json"
    wrong = {"zero_optimization": {f"stag{NASTY}": 2, "stage": f"{NASTY}2"}, "train_batch_size": f"8{NASTY}"}
    (tmp_path / name).write_text(json.dumps(wrong, ensure_ascii=False))
    (tmp_path / f"right{name}").write_text(json.dumps({"train_batch_size": 8, "wall_clock_breakdown": False}))
    (tmp_path / f"train{name}.py").touch()
    command = [sys.executable, "-m", "zero_plugin", *(argument.format(name=name) for argument in arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == code, output
    assert "Traceback" not in output
    assert_clean(output)
    if "--format" in arguments and arguments[-1] == "json":
        json.loads(done.stdout)


def test_a_dry_run_is_the_same_words_for_a_shell(tmp_path: Path) -> None:
    """The printed script starts the program of that name, although other characters are shown."""
    script = tmp_path / f"it's{NASTY}\\.py"
    script.write_text("print('started')")
    flags = ["launch", "--cpu", "--num_processes", "1", "--dry_run", str(script)]
    done = subprocess.run([sys.executable, "-m", "zero_plugin", *flags], capture_output=True, text=True, check=True)
    assert_clean(done.stdout)
    (line,) = (line for line in done.stdout.splitlines() if "it" in line and not line.startswith("#"))
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout.decode()
    assert str(script) in words.split("\0")


def test_messages_errors_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Raised, logged and printed texts are escaped without the caller's help."""
    import logging

    show_messages()
    logging.getLogger("zero_plugin.test").warning("peer said %s", NASTY)
    print_line(NASTY)
    print_rows([[NASTY, (NASTY, "red")]])
    for stream in capsys.readouterr():
        assert_clean(stream)
    assert_clean(str(CheckpointError(NASTY)))
    assert_clean(str(ConfigError([Problem(NASTY, NASTY, NASTY, NASTY)])))


def test_unpaired_surrogates_and_readable_text() -> None:
    """Half a character, from a file name that is not UTF-8, can be printed. Other languages and emoji stay."""
    assert printable("a\udc80b") == "a\\udc80b"
    readable = "naïve 中文 עברית 👩\u200d💻\ttab\nline"
    assert printable(readable) == readable


def test_names_and_values_that_are_no_utf8(tmp_path: Path) -> None:
    """Invalid UTF-8 gives a located error, and no traceback."""
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": "\\ud800"}}')
    name = os.fsdecode(b"b\xff.json")
    (tmp_path / name).write_text('{"stage": 2}')
    command = [sys.executable, "-m", "zero_plugin", "check", "a.json", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert rb"a.json:1:24: error" in done.stdout, done.stdout
    assert rb"b\udcff.json:1:2: error" in done.stdout
