"""Runs programs on paths in pools of processes, compares them with plain torch, and counts.

python tests/random_programs/runner.py SEED[-SEED] [--paths one,ddp] [--only MODEL]
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import plain  # noqa: E402
import torch  # noqa: E402
from device import place_process  # noqa: E402
from forked import SERVER  # noqa: E402
from grammar import DIMENSIONS, PATHS, WORLD, Program, draw  # noqa: E402
from launching import start_script, wait_for_ends  # noqa: E402

KERNELS = ("2off", "3off")  # DeepSpeed's own compute the update there
STAND_STILL = 90.0  # seconds for one program


@dataclass
class Outcome:
    """The outcome of a program on a path: `right`, `refused` or `wrong`, and the reason."""

    program: Program
    path: str
    then: str  # the path on which it resumes, or ""
    verdict: str = ""
    why: str = ""
    seconds: float = 0.0
    alone: bool = False
    parts: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.program.seed}-{self.path}{'-alone' if self.alone else ''}"


# ---- processes -------------------------------------------------------------------------------------------------------


def wait(workers: list[Any], seen: Any, *, seconds: float = STAND_STILL) -> list[int | None]:
    """Wait for processes. If one fails, or shows no progress for the given time, kill the others."""
    last, since = seen(), time.monotonic()

    def is_over(ended: Mapping[int, float]) -> bool:
        nonlocal last, since
        if (now := seen()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > (20 if any(workers[index].returncode for index in ended) else seconds)

    ended = wait_for_ends(workers, is_over)
    return [worker.returncode if index in ended else None for index, worker in enumerate(workers)]


def run_pool(world: int, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run all jobs. After a failed one, new processes run the rest."""
    left, turn = list(jobs), 0
    while left:
        turn += 1
        mark = f"{world}-{time.monotonic_ns()}"
        listed, log = folder / f"jobs-{mark}.json", folder / f"log-{mark}.txt"
        listed.write_text(json.dumps(left))
        store = folder / f"store-{mark}"
        script = HERE / "worker.py"
        workers = [start_script(script, store, rank, world, listed, folder, log=log) for rank in range(world)]
        wait(workers, lambda: len(list(folder.glob("*.begun"))))
        begun = [job for job in left if list(folder.glob(f"{job['id']}.*.begun"))]
        for job in begun:
            job["log"] = str(log)
        left = left[len(begun) :] if begun else []


def run_alone(world: int, job: dict[str, Any], folder: Path) -> None:
    """Run a job in separate processes, which must exit with 0 and print no error."""
    log, listed = folder / f"log-{job['id']}.txt", folder / f"{job['id']}.json"
    listed.write_text(json.dumps(job))
    port = str(random.randrange(20_000, 32_000))
    variables = (
        [{}] if world == 1 else [{**place_process(str(r), str(world)), "MASTER_PORT": port} for r in range(world)]
    )
    begun = time.perf_counter()
    workers = [start_script(HERE / "alone.py", listed, folder, log=log, variables=some) for some in variables]
    codes = wait(workers, lambda: len(list(folder.glob(f"{job['id']}.*.pt"))))
    text = log.read_text(errors="replace")
    job.update(log=str(log), seconds=time.perf_counter() - begun, codes=codes)
    job["end"] = "" if codes == [0] * world and "Traceback" not in text else f"ended with {codes}:\n{text[-1500:]}"


def read(job: dict[str, Any], folder: Path, world: int) -> dict[str, Any]:
    """Read a job's results of all processes: any failure, or rank 0's numbers."""
    found = []
    for rank in range(world):
        file = folder / f"{job['id']}.{rank}.pt"
        found.append(
            torch.load(file, weights_only=False) if file.exists() else {"failed": f"process {rank} did not end"}
        )
    seconds = max(one.get("seconds", job.get("seconds", 0.0)) for one in found)
    if job.get("end") and not any("refused" in one for one in found):
        return {"failed": job["end"], "seconds": seconds}
    told = [one.get("failed") for one in found]
    if any(told):
        others = [one["refused"] for one in found if "refused" in one]
        return {"failed": "\n".join([*filter(None, told), *others]), "seconds": seconds}
    refused = [one.get("refused") for one in found]
    if all(refused):
        return {**found[0], "seconds": seconds}
    if any(refused):
        return {"failed": f"refused by one process alone: {next(filter(None, refused))}", "seconds": seconds}
    return {**found[0], "seconds": seconds}


# ---- comparing -------------------------------------------------------------------------------------------------------


def largest(got: list[float], wanted: list[float]) -> float:
    """Return the largest difference of numbers, relative for large ones. It is infinite if the counts differ."""
    if len(got) != len(wanted):
        return float("inf")
    return max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(got, wanted, strict=True)), default=0.0)


def judge(outcome: Outcome, wanted: dict[str, Any]) -> None:
    """Return the verdict."""
    parts = outcome.parts
    outcome.seconds = sum(part["seconds"] for part in parts)
    for part in parts:
        for verdict in ("failed", "refused"):
            if verdict in part:
                outcome.verdict, outcome.why = "wrong" if verdict == "failed" else verdict, part[verdict].strip()
                return
    got = {name: [n for part in parts for n in part[name]] for name in ("losses", "norms", "rates", "metrics")}
    half, kernels = outcome.program.precision == "bf16", outcome.path in KERNELS or outcome.then in KERNELS
    limit = 1e-2 if half else 1e-4 if kernels else 1e-5
    found = {name: largest(got[name], wanted[name]) for name in ("losses", "metrics")}
    found["norms"] = largest(got["norms"], wanted["norms"]) / 10  # a norm covers all gradients
    flat = [[n for step in rates["rates"] for n in step] for rates in (got, wanted)]
    found["rates"] = largest(*flat)
    weights = parts[-1]["weights"]
    if weights.keys() != wanted["weights"].keys():
        found["names of weights"] = float("inf")
    else:
        pairs = [(weights[name].float(), tensor) for name, tensor in wanted["weights"].items()]
        found["weights"] = max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in pairs) / 10
        away = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        moved = sum(float(tensor.square().sum()) for tensor in wanted["moved"].values()) ** 0.5
        rounding = 0.004 * sum(float(b.square().sum()) for _, b in pairs) ** 0.5 if half else 0.0
        found["movement"] = max(away - rounding, 0.0) / max(moved, 1e-3) / (10 if half else 100)
    outcome.numbers = {"got": got, "wanted": {name: wanted[name] for name in got}}
    bad = {name: value for name, value in found.items() if not value <= limit}
    outcome.verdict = "wrong" if bad else "right"
    outcome.why = ", ".join(f"{name} {value:.1e}" for name, value in (bad or found).items())


def plan(programs: Iterable[Program], paths_of: Any, alone: Any = lambda program: False) -> list[Outcome]:
    """Choose the programs and their paths."""
    outcomes = []
    for program in programs:
        for path in paths_of(program):
            then = "" if program.resume == "no" else path
            if program.resume == "other":
                others = [other for other in PATHS if other != path and may_follow(program, path, other)]
                then = others[program.seed % len(others)] if others else path
            outcomes.append(Outcome(program, path, then, alone=alone(program)))
    return outcomes


def may_follow(program: Program, path: str, other: str) -> bool:
    """Return whether a path can resume another: in 16 bits both have masters, or the world sizes must match."""
    from material import OF_EACH_RANK

    if program.precision != "no" and (path in ("one", "ddp")) != (other in ("one", "ddp")):
        return False
    needs = program.model in OF_EACH_RANK or program.length != "exact"
    return not needs or WORLD.get(path, 2) == WORLD.get(other, 2)


def execute(outcomes: list[Outcome], folder: Path) -> None:
    """Run first parts, then second parts, each in the pool for its number of processes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        for world in (1, 2):
            jobs: list[tuple[Outcome, dict[str, Any]]] = []
            for outcome in outcomes:
                if number and (not outcome.then or "weights" not in outcome.parts[0]):
                    continue
                path = outcome.then if number else outcome.path
                if WORLD.get(path, 2) != world:
                    continue
                part = "second" if number else "first" if outcome.then else "whole"
                here = folder / outcome.name
                here.mkdir(exist_ok=True)
                job: dict[str, Any] = {"id": f"{outcome.name}-{part}", "path": path, "part": part}
                job |= {"program": outcome.program.to_dict(), "folder": str(here)}
                jobs.append((outcome, job))
            together = [job for outcome, job in jobs if not outcome.alone]
            if together:
                run_pool(world, together, folder)
            for outcome, job in jobs:
                if outcome.alone:
                    run_alone(world, job, folder)
            for outcome, job in jobs:
                outcome.parts.append({**read(job, folder, world), "log": job.get("log", "")})
    references: dict[Any, dict[str, Any]] = {}
    for outcome in outcomes:
        key = (outcome.program, WORLD.get(outcome.path, 2), outcome.path not in ("one", "ddp"))
        if key not in references:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                references[key] = plain.run(key[0], key[1], zero=key[2])
        judge(outcome, references[key])


# ---- tables ----------------------------------------------------------------------------------------------------------


def masked(text: str) -> str:
    """Return a message without the parts that vary between programs."""
    text = " ".join(text.split())
    return re.sub(r"'[^']*'|`[^`]*`|[\d.e+-]*\d[\d.e+-]*|/\S+", "…", text)[:200]


def tables(outcomes: list[Outcome]) -> str:
    """Format a table: dimension | programs | right | refused | wrong, then what was refused or wrong."""
    lines = ["dimension | value | programs | right | refused | wrong"]

    def row(name: str, value: Any, some: list[Outcome]) -> None:
        verdicts = [outcome.verdict for outcome in some]
        counts = [str(verdicts.count(verdict)) for verdict in ("right", "refused", "wrong")]
        lines.append(" | ".join([name, str(value), str(len({o.program for o in some})), *counts]))

    for path in PATHS:
        row("path", path, [o for o in outcomes if o.path == path])
    row("all", "", outcomes)
    row("alone", "yes", [o for o in outcomes if o.alone])
    for name in DIMENSIONS:
        for value in sorted({getattr(o.program, name) for o in outcomes}, key=str):
            row(name, value, [o for o in outcomes if getattr(o.program, name) == value])
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.verdict == "refused":
            groups.setdefault(masked(outcome.why), []).append(outcome)
    lines.append("\nrefused:")
    for message, some in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(
            f"{len(some)} × {message}\n    {' '.join(o.name for o in some[:12])}\n"
            f"    e.g. {' '.join(some[0].why.split())[:500]}"
        )
    lines.append("\nwrong:")
    lines += [f"{o.name} {o.then}: {o.why[-1500:]}" for o in outcomes if o.verdict == "wrong"]
    return "\n".join(lines)


def changes(program: Program) -> str:
    """Return a program's values that are not plain."""
    default = Program(program.seed)
    return ", ".join(f"{n}={getattr(program, n)}" for n in DIMENSIONS if getattr(program, n) != getattr(default, n))


# Words of documented refusals, and the programs that they apply to.
KNOWN: tuple[tuple[str, Any], ...] = (
    ("a second backward through one forward", lambda p, zero, stage3: p.backwards == "one graph" and stage3),
    ("Build all its groups before prepare()", lambda p, zero, stage3: p.added == "after" and zero),
    ("Leave the group out", lambda p, zero, stage3: p.frozen == "in the optimizer" and p.groups != "one" and zero),
    ("Use stage 0 or DDP", lambda p, zero, stage3: p.optimizer == "Adafactor" and zero),
    ('Write "data_types"', lambda p, zero, stage3: p.model == "scalar and list" and p.precision == "bf16" and zero),
)


def is_known(outcome: Outcome) -> bool:
    """Return whether the documentation names this refusal for this program."""
    paths = {outcome.path, outcome.then} - {""}
    zero, stage3 = not paths <= {"one", "ddp"}, any(path.startswith("3") for path in paths)
    return any(words in outcome.why and fits(outcome.program, zero, stage3) for words, fits in KNOWN)


def findings(outcomes: list[Outcome]) -> list[str]:
    """Return wrong results and undocumented refusals."""
    return [
        f"{o.name}{f', resumed on {o.then}' if o.then else ''}: {o.verdict}: {o.why[-1500:]}\n    {changes(o.program)}"
        for o in outcomes
        if o.verdict == "wrong" or (o.verdict == "refused" and not is_known(o))
    ]


def spread(seeds: Iterable[int], each: int) -> list[Outcome]:
    """Assign each program to several paths, so all paths get equally many. Every fourth program runs alone."""
    step = len(PATHS) // each
    programs = [draw(seed) for seed in seeds]

    def paths_of(program: Program) -> list[str]:
        return [PATHS[(program.seed + step * number) % len(PATHS)] for number in range(each)]

    return plan(programs, paths_of, lambda program: program.seed % 4 == 0)


def main() -> None:
    """Run a slice by hand."""
    import tempfile

    from forked import ForkServer

    seeds, *options = sys.argv[1:]
    paths = options[0].split(",") if options else list(PATHS)
    count = int(options[1]) if len(options) > 1 else len(paths)
    alone = options[2:] == ["alone"]
    ranges = [part.partition("-") for part in seeds.split(",")]
    folder = Path(tempfile.mkdtemp())
    os.environ[SERVER] = str(folder / "server")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "startup"), os.environ.get("PYTHONPATH", "")])
    os.environ.update(HF_HOME=str(folder / "hf"), ZERO_PLUGIN_RUNS=str(folder / "runs"))
    from build_ops import use_quick_compiler

    use_quick_compiler()
    server = ForkServer(folder / "server")
    torch.set_num_threads(1)
    programs = [draw(seed) for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
    begun = time.perf_counter()
    outcomes = plan(
        programs, lambda p: [paths[(p.seed * count + k) % len(paths)] for k in range(count)], lambda p: alone
    )
    execute(outcomes, folder / "runs-of-programs")
    print(tables(outcomes))
    for outcome in outcomes:
        if outcome.verdict == "wrong" or len(outcomes) < 30:
            print(
                f"{outcome.name} {outcome.then}: {outcome.seconds:.1f} s {outcome.verdict} {outcome.why[-300:]}\n"
                f"   {changes(outcome.program)}"
            )
            print("   ", [part.get("log") for part in outcome.parts])
            for whose, numbers in outcome.numbers.items():
                print(
                    f"    {whose}: losses {numbers['losses']}, norms {numbers['norms']}, rates {numbers['rates'][:8]}"
                )
    print(f"{len(outcomes)} runs in {time.perf_counter() - begun:.0f} s")
    server.close()


if __name__ == "__main__":
    main()
