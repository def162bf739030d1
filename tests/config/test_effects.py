"""Every key of DeepSpeed's configuration changes what a run does, or is spoken of by `check` or by the run.

`make campaign` prints a table, key | what changed, of real engines on the CPU; the ordinary suite asks `check` alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.registry import deepspeed_schema, walk_keys
from zero_plugin.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from effect_cases import Case, cases

_EXPERTS: Final = "only models with mixture-of-experts layers read it"
# Keys, or all of a section, whose effect cannot be seen here: why.
NOT_TO_BE_SEEN: Final[Mapping[str, str]] = {
    "managed_gradient_accumulation": "false is what runs; true is an error",
    "zero_force_ds_cpu_optimizer": "false is what runs",
    "expert_parallel": _EXPERTS,
    "use_data_before_expert_parallelism": _EXPERTS,
    "zero_optimization.zenflow": "ZenFlow fails in the first step of a loop that steps for itself",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "transformers' Trainer saves by it",
    "zero_optimization.zero_hpz_partition_size": "one process is one node",
    "weight_quantization.quantized_initialization": "needs a GPU",
    "hybrid_engine": "needs a GPU",
    "wandb": "needs a login",
    "comet": "needs a package that is not installed",
}
SECONDS: Final = 7200


def is_excused(key: str) -> bool:
    """Whether a key is in the table, by itself or with its section."""
    return any(f"{key}.".startswith(f"{known}.") for known in NOT_TO_BE_SEEN)


def spoken(case: Case) -> list[str]:
    """What `check` says of the configuration with the key, and not of the one without."""

    def problems(config: dict[str, Any]) -> set[str]:
        try:
            found: Iterable[Any] = find_problems(document_from_mapping(config, "code"))
        except ConfigError as error:
            found = error.problems
        return {f"{p.severity}: {p.key}: {p.message}" for p in found if p.severity != "note"}

    new = problems(case.after) - problems(case.before)
    faulty = [line for line in new if "unknown key" in line or "is not legal here" in line]
    assert not faulty, f"{case.name}: the table's value is none: {faulty}"
    return sorted(new)


def effects(tried: list[Case], workers: int = 2) -> Iterator[list[Any]]:
    """The answers of `effect_worker.py` to each of the cases."""

    def work(part: list[Case]) -> list[list[Any]]:
        script = Path(__file__).with_name("effect_worker.py")
        with subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        ) as worker:  # fmt: skip
            assert worker.stdin is not None
            assert worker.stdout is not None
            lines = "".join(json.dumps([case.name, case.before, case.after]) + "\n" for case in part)
            stdin = worker.stdin
            feeding = threading.Thread(target=lambda: (stdin.write(lines), stdin.close()))
            feeding.start()
            answers = [json.loads(line[6:]) for line in worker.stdout if line.startswith("EFFECT")]
            feeding.join()
        assert len(answers) == len(part), "the worker did not come to its end"
        return answers

    with ThreadPoolExecutor(workers) as pool:
        for answers in pool.map(work, [tried[n::workers] for n in range(workers)]):
            yield from answers


def verdict(case: Case, changed: list[str], said: list[str], error: str, before: str) -> str:
    """What a key does, "" where it is silent."""
    told = [line for line in said if case.key[-1] in line]
    if error and error != before:
        return "error: " + error.strip().splitlines()[-1][:120]
    if before:
        return ""
    return (changed and changed[0][:120]) or (told and told[0][:120]) or ""


def test_excused_keys_exist() -> None:
    """The table names no key that DeepSpeed does not have."""
    known = {".".join(path) for path, _ in walk_keys(deepspeed_schema())}
    assert set(NOT_TO_BE_SEEN) <= known


def test_a_sample_of_keys_is_legal_beside_what_check_says() -> None:
    """Whatever `check` says of a key, it says of the key itself, or of the value of another that contradicts it."""
    for case in random.Random(17).sample(list(cases()), 60):
        spoken(case)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
@pytest.mark.usefixtures("built_ops")
def test_no_key_is_silent() -> None:
    """Each key in each of its surroundings: the optimizer, hooks, files, memory or calls differ, or it is spoken of."""
    table, tried = {}, []
    for case in cases():
        if told := spoken(case):
            table[case.name] = told[0]
        elif is_excused(".".join(case.key)):
            table[case.name] = "not to be seen: " + next(
                why for known, why in NOT_TO_BE_SEEN.items() if f"{'.'.join(case.key)}.".startswith(f"{known}.")
            )
        else:
            tried.append(case)
    by_name = {case.name: case for case in tried}
    for name, *answer in effects(tried):
        table[name] = verdict(by_name[name], *answer)
    for name, what in table.items():
        print(f"{name} | {what}")
    silent = [name for name, what in table.items() if not what]
    assert not silent, f"{len(silent)} keys change nothing, and nobody says so: {silent}"
