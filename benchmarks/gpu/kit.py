"""Run all checks that need a GPU, in pieces of at most nine minutes: `make gpu`, or `make gpu PIECES="checks peaks"`.

The kit uses the Python that starts it, prints what is installed, and needs no network. Each piece ends with one table
or count. The kit prints it and appends it to benchmarks/RESULTS.md with date, device and versions. A piece that is done
on this commit does not run again. A piece that takes too long is stopped by SIGTERM, and reports what it has measured.
Rows of peaks are kept for the next time.

    ops          DeepSpeed's C++ ops, which the others need
    streams      late streams, steps that the host queues, memory that runs out
    parity       plain torch's numbers on every path, as one process over NCCL and as two over gloo
    checks       the loop's checks, as two processes over gloo
    kinds        sixty kinds of training code against plain torch
    peaks        the plan's peak of memory against the measured one, 24 times
    capped       GPT-2 XL in 24 GB: the announcement's configuration against `auto`
    steps        a step against the same loop on the bare engine, plain torch and Accelerate
    stages       a model of 1.2 billion parameters with every stage and offload
    checkpoints  saving and loading, ordinary and asynchronous
    tables       the announcement's largest batches

    python benchmarks/gpu/kit.py --pieces peaks capped
    python benchmarks/gpu/kit.py --rehearse        # on a machine without a GPU: the same commands at toy sizes
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "gpu"
LIMIT_S = 540
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pytest", "pytest-xdist")
TABLE = "|"
# pytest's output for each test on several workers with -v
STARTED = re.compile(r"^(tests/\S+::.+) $", re.MULTILINE)
RESULT = re.compile(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (.+?) *$", re.MULTILINE)


def main() -> None:
    args = read_arguments()
    folder = KEPT / ("rehearsed" if args.rehearse else commit())
    folder.mkdir(parents=True, exist_ok=True)
    where = describe_machine()
    print(where, flush=True)
    if "NVIDIA" not in where and not args.rehearse:
        sys.exit("This machine has no GPU. --rehearse tries the same commands at toy sizes.")
    failed = []
    for name in args.pieces:
        done = folder / f"{name}.txt"
        if done.exists() and not args.again:
            print(f"{name}: done before, {done}")
            continue
        code, output, seconds = run_piece(name, folder, args)
        print(output, f"{name}: {seconds:.0f} s, exit code {code}", sep="\n", flush=True)
        if code:
            failed.append(name)
        else:
            done.write_text(output)
        if not args.rehearse:
            append(args.results, name, where, output, code)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", nargs="+", choices=list(commands(ROOT, False)), default=list(commands(ROOT, False)))
    parser.add_argument("--again", action="store_true", help="also run pieces that are done on this commit")
    parser.add_argument("--seconds", type=int, default=LIMIT_S, help=f"until a piece is stopped (default {LIMIT_S})")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU, at toy sizes; RESULTS.md is not changed"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    return parser.parse_args()


def commands(rows: Path, rehearse: bool) -> dict[str, list[list[str]]]:
    """Return the commands of each piece, without Python's name.

    Args:
        rows: a folder for rows that are kept.
        rehearse: whether to use toy sizes, without a GPU.
    """
    gpu, benchmarks = "benchmarks/gpu", "benchmarks"
    workers = str(max(2, min(12, (os.cpu_count() or 2) // 2)))
    pytest = f"-m pytest -v --tb=short -p no:cacheprovider -p no:benchmark --numprocesses {workers}".split()
    pytest += ["--dist", "loadgroup", "--no-loadscope-reorder"]
    small = ["--cpu"] if rehearse else []
    tiny = ["--width", "64", "--layers", "2", "--block", "64", "--steps", "3"] if rehearse else []
    little = ["--gigabytes", "0.03", "--rounds", "1"] if rehearse else ["--gigabytes", "0.5", "--rounds", "2"]
    cases = ["--cases", "stage 2, fp32", "stage 3, bf16"]
    short = (
        ["--pairs", "2", "--steps", "2", "--sizes", "tiny"] if rehearse else ["--pairs", "9", "--sizes", "tiny", "25M"]
    )
    one_process = ("tests/kinds/test_kinds.py", "-k", "single or one-process")
    few, some = (["-k", f"{words} and zero2"] if rehearse else [] for words in ("plain", "clip"))
    return {
        "ops": [["tests/build_ops.py"]],
        "streams": [[*pytest, "tests/gpu"]],
        "parity": [[*pytest, *few, "tests/parity"]],
        "checks": [[*pytest, *some, "-m", "processes", "tests/strategies", "tests/several_models"]],
        "kinds": [[*pytest, "-m", "processes", *(one_process if rehearse else ("tests/kinds",))]],
        "peaks": [
            [f"{gpu}/plan_peaks.py", "--only", "peaks", "--together", "4", "--kept", str(rows), *small]
            + (["--rows", "0:3"] if rehearse else [])
        ],
        "capped": [[f"{gpu}/plan_peaks.py", "--only", "cap", "--kept", str(rows), *small]],
        "steps": [
            [f"{benchmarks}/step.py", "--processes", "1", *short, "--paths", path]
            for path in ("single", "zero0", "zero1", "zero2", "zero3")
        ],
        "stages": [[f"{gpu}/stages.py", *small, *tiny]],
        "checkpoints": [
            [f"{benchmarks}/checkpoint.py", "--processes", "1", "--verifications", "2", *cases, *little],
            [f"{benchmarks}/save_async.py", "--processes", "1", *little],
        ],
        "tables": [[f"{gpu}/blog_tables.py", "--models", "gpt2_xl"]],  # without a GPU, only the predictions
    }


def run_piece(name: str, folder: Path, args: argparse.Namespace) -> tuple[int, str, float]:
    """Return the exit code, the end of the commands' output, and the seconds."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if args.rehearse:  # the tests' compiler; with another, each would rebuild the ops
        environ |= {"CXX": "quick-g++", "PATH": f"{ROOT / 'tests'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    else:
        environ["ZERO_PLUGIN_TEST_DEVICE"] = "cuda"
    if name in ("streams", "parity", "checks", "kinds"):
        environ["OMP_NUM_THREADS"] = "1"  # many processes run at a time, and each would take all cores
    if name in ("steps", "checkpoints"):
        environ["ZERO_PLUGIN_QUIET"] = "1"  # other messages would hide the output of each row
    began, endings, late, code = time.monotonic(), [], [], 0
    log = folder / f"{name}.log"
    log.write_text("")
    for arguments in commands(folder / "rows", args.rehearse)[name]:
        left = args.seconds - (time.monotonic() - began)
        if left < 1:
            late.append(" ".join(arguments))
            continue
        before = log.stat().st_size
        with log.open("a") as written:
            command = [sys.executable, *arguments]
            running = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=written, stderr=2, start_new_session=True)
            try:
                code = running.wait(left) or code
            except subprocess.TimeoutExpired:
                code = 124
                end(running)
        endings.append(ending(log.read_bytes()[before:].decode(errors="replace")))
    if late:
        endings.append(f"not run: no time was left: {'; '.join(late)}")
    return 124 if late else code, "\n\n".join(endings), time.monotonic() - began


def end(running: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it started, which would hold the GPU's memory.

    The command first prints its results so far. Launchers end their workers first, so the whole group gets some
    seconds, even if the command itself has ended.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, sent)
            until = time.monotonic() + 10
            while time.monotonic() < until:
                running.poll()
                os.killpg(running.pid, 0)
                time.sleep(0.1)


def ending(text: str) -> str:
    """Return a program's tables, pytest's summary or a summary of its lines, or the last lines."""
    lines = text.rstrip().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith(TABLE)), None)
    if first is not None:
        return "\n".join(lines[max(0, first - 6) :])  # with the title and the lines before it
    results = RESULT.findall(text)
    if not results:
        return "\n".join(lines[-40:])
    if lines[-1].startswith("===="):
        return "\n".join([line for line in lines[-60:-1] if re.match("(FAILED|ERROR) tests/", line)] + lines[-1:])
    counts = ", ".join(f"{count} {word.lower()}" for word, count in Counter(word for word, _ in results).items())
    failed = [f"{word} {test}" for word, test in results if word in ("FAILED", "ERROR")]
    running = sorted(set(STARTED.findall(text)) - {test for _, test in results})
    return "\n".join([f"pytest was stopped: {counts}", *failed, *(f"running {test}" for test in running)])


def describe_machine() -> str:
    """Describe GPU, driver and versions; missing packages are "not installed"."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        gpu = "no GPU"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return ", ".join([str(date.today()), gpu, f"{os.cpu_count()} cores", python, *map(installed, PACKAGES)])


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def commit() -> str:
    """Return the last commit, or "unknown" if git or its folder is missing."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def append(results: Path, name: str, where: str, output: str, code: int) -> None:
    """Append the output of a piece under its own heading."""
    status = "" if code == 0 else f", exit code {code}"
    body = output if TABLE in output else f"```\n{output}\n```"
    with results.open("a") as file:
        file.write(f"\n### GPU, {name}{status}\n\n{where}\n\n{body}\n")


if __name__ == "__main__":
    main()
