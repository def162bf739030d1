"""Tests a sample of the package's mutants with the tests that run the mutated line, and prints the survivors.

Results are saved as they come. A second start resumes from them if the package is unchanged. With `--again`, mutants
that the daily tests missed are tried once more on the present tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from build_ops import build_ops, use_quick_compiler  # noqa: E402
from lines import ROOT, Lines, Test, copy_of, environment_for, record  # noqa: E402
from mutations import PACKAGE, Mutant, digest_of, mutants_of, sample  # noqa: E402

AT_ONCE = 2
# The order of the pytest calls for a mutant, until one fails: tests in pytest's own process cost seconds. The
# campaign's tests come last, so a mutant that only they catch is one that the daily tests miss.
CALLS = (
    ("daily", False, 40),
    ("daily", True, 12),
    ("daily", True, 60),
    ("campaign", True, 24),
)
# A call has failed if its processes write nothing and use almost no CPU time for the first number of seconds, or use
# the second number of CPU seconds.
_STILL_SECONDS, _ENDLESS_SECONDS = 100, 200
_STILL = 0.02  # of CPU time
_LOOK_SECONDS = 5


@dataclass(frozen=True)
class Outcome:
    """The outcome of some tests on a mutant.

    Attributes:
        by: the test that caught it, "" for none.
        says: the failure.
    """

    by: str = ""
    says: str = ""


def try_on(mutant: Mutant, lines: Lines, folder: Path) -> dict[str, Any]:
    """Return a mutant's result: caught by "daily" tests or those of the "campaign", or "lost"."""
    began = time.monotonic()
    tests = lines.tests_of(mutant)
    copy = copy_of(ROOT, folder / "copy")
    mutant.apply(copy)
    caught, outcome, tried = "lost", Outcome(), []
    for kind, with_processes, most in CALLS:
        left = [test for test in tests if test not in tried]
        chosen = [test for test in left if (test.daily, test.processes) == (kind == "daily", with_processes)][:most]
        tried += chosen
        if chosen and (outcome := run_tests(copy, chosen, folder)).by:
            caught = kind
            break
    return {
        "mutant": mutant.name,
        "caught": caught,
        "by": outcome.by,
        "says": outcome.says,
        "tests": len(tests),
        "tried": len(tried),
        "seconds": round(time.monotonic() - began),
        "change": mutant.change(ROOT / PACKAGE),
    }


def run_tests(copy: Path, tests: Sequence[Test], folder: Path) -> Outcome:
    """Run tests on a copy, in a separate pytest, up to the first failure."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    written = folder / "output"
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [f"--basetemp={folder / 'temporary'}", *(test.node for test in tests)]
    environment = environment_for(copy, ZERO_PLUGIN_TESTS_BUILT_OPS="1", TMPDIR=str(folder))
    with written.open("w") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        reason = _wait_for(process, written, folder / "temporary")
    if reason:
        return Outcome("a limit", reason)
    if process.returncode == 0:
        return Outcome()
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        for found in (found for kind in ("failure", "error") for found in case.iter(kind)):
            told = [line[1:].strip() for line in (found.text or "").splitlines() if line.startswith("E ")]
            return Outcome(
                f"{case.get('classname')}::{case.get('name')}", told[-1] if told else found.get("message", "")
            )
    return Outcome("pytest", written.read_text()[-500:])  # it cannot import what it needs


def _wait_for(process: subprocess.Popen[bytes], output: Path, temporary: Path) -> str:
    """Wait for a pytest and kill its leftovers. Return why it had to be killed, or ""."""
    seen: set[psutil.Process] = set()
    reason, size, used, worked, active = "", -1, 0.0, 0.0, time.monotonic()
    while not reason:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
            break
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(process.pid)
            seen |= {one, *one.children(recursive=True)}
        used_before, used = used, sum(_used_by(seen))  # less after a process has ended
        size_before, size = size, sum(_sizes(output, temporary))
        worked = worked + max(0.0, used - used_before) if size == size_before else 0.0
        if size != size_before or abs(used - used_before) > _LOOK_SECONDS * _STILL:
            active = time.monotonic()
        if worked > _ENDLESS_SECONDS:
            reason = "runs on and on"
        elif time.monotonic() - active > _STILL_SECONDS:
            reason = "stands still"
    for one in seen:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()
    return reason


def _used_by(processes: set[psutil.Process]) -> Iterator[float]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield sum(process.cpu_times()[:2])


def _sizes(output: Path, temporary: Path) -> Iterator[int]:
    for file in (output, *temporary.rglob("*.log")):
        with contextlib.suppress(OSError):
            yield file.stat().st_size


def summarize(results: Sequence[dict[str, Any]]) -> str:
    """Return how many mutants each kind of test caught, and the list that the daily tests missed."""
    of = {kind: [result for result in results if result["caught"] == kind] for kind in ("daily", "campaign", "lost")}
    not_run = sum(not result["tests"] for result in of["lost"])
    both = len(of["daily"]) + len(of["campaign"])
    lines = []
    for kind, title in (("lost", "No test catches"), ("campaign", "The campaign's tests alone catch")):
        for result in of[kind]:
            ran = f"{result['tried']} of the {result['tests']} tests that run it were tried" if result["tests"] else ""
            lines += [f"{title} {result['mutant']}  ({ran or 'no test runs it'})", result["change"]]
    lines.append(
        f"{len(results)} mutants: {both} are caught by all tests, {len(of['daily'])} by the daily ones; "
        f"of the {len(of['lost'])} others, {not_run} are on lines that no test runs."
    )
    return "\n".join(lines)


def main() -> None:
    """Try the sample, or the rest of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=int(os.environ.get("ZERO_PLUGIN_MUTANTS", "150")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="a folder for what is kept")
    parser.add_argument("--again", action="store_true", help="record the lines anew, and try what was lost")
    options = parser.parse_args()
    folder = options.results / f"{digest_of(ROOT)}-{options.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    use_quick_compiler()
    build_ops()
    kept, recorded = folder / "results.jsonl", folder / "lines.json"
    results = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    if options.again:
        results = [result for result in results if result["caught"] == "daily"]
        kept.write_text("".join(f"{json.dumps(result)}\n" for result in results))
        recorded.unlink(missing_ok=True)
    if not recorded.exists():
        with tempfile.TemporaryDirectory(prefix="zero-plugin-lines-", ignore_cleanup_errors=True) as place:
            record(Path(place, "recording")).save(recorded)
    lines = Lines.load(recorded)
    mutants = sample(mutants_of(ROOT / PACKAGE), options.count, options.seed)
    known = {result["mutant"] for result in results}
    turn = threading.Lock()

    def run(mutant: Mutant) -> None:
        with tempfile.TemporaryDirectory(prefix="zero-plugin-mutant-", ignore_cleanup_errors=True) as place:
            result = try_on(mutant, lines, Path(place))
        with turn, kept.open("a") as file:
            results.append(result)
            print(json.dumps(result), file=file)
            number = f"{len(results)}/{len(mutants)}"
            print(f"{number} {result['caught']:8} {result['seconds']:4} s  {mutant.name}  {result['by']}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, [mutant for mutant in mutants if mutant.name not in known]))
    names = {mutant.name for mutant in mutants}
    print(summarize([result for result in results if result["mutant"] in names]))


if __name__ == "__main__":
    main()
