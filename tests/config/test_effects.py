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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.schema import deepspeed_schema, walk_keys
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
    "zero_optimization.zenflow": "is an error",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "transformers' Trainer saves by it",
    "zero_optimization.zero_hpz_partition_size": "one process is one node",
    "weight_quantization.quantized_initialization": "needs a GPU",
    "hybrid_engine": "needs a GPU",
    **{
        f"data_efficiency.data_routing.random_ltd.{key}": "layers that a script converts by DeepSpeed's helper read it"
        for key in ("random_ltd_layer_id", "model_mask_name", "model_type", "hidden_state_order")
    },
    "data_efficiency.enabled": "a switch of what is below it",
    "data_efficiency.data_routing.enabled": "a switch of what is below it",
    "wandb": "needs a login",
    "comet": "needs a package that is not installed",
}
# Keys whose value is only to be seen where an engine holds it: why.
ONLY_HELD: Final[Mapping[str, str]] = {
    "zero_optimization.log_trace_cache_warnings": "warns where a model runs its modules in another order than before",
    "optimizer.params.t0": "ASGD keeps an average of the weights from then on, in its state",
    "data_efficiency.data_routing.random_ltd.total_layer_num": "counts the tokens of layers",
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_num": "counts the tokens of layers",
    **{
        f"data_efficiency.data_routing.random_ltd.random_ltd_schedule.{key}": "the tokens that converted layers keep"
        for key in ("min_value", "max_value", "schedule_config.seq_per_step")
    },
}
# Cases in which a key has nothing to do, which does something in others: why.
IDLE: Final[Mapping[str, str]] = {
    "optimizer.params.torch_adam of AdamW [zero2]": "on a CPU without offload torch's runs anyway",
}
HELD: Final = "only held: "
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
    # A whole section that has no effect is spoken of with or without one more of its keys.
    sections = [".".join(case.key[:n]) for n in range(1, len(case.key))]
    idle = [line for line in problems(case.after) if any(f": {one}: has no effect" in line for one in sections)]
    return sorted(new) or sorted(idle)


def in_parts(tried: Iterable[Case], workers: int) -> list[list[Case]]:
    """The cases for each worker; those with the same first configuration follow one another at the same worker."""
    groups: dict[str, list[Case]] = {}
    for case in tried:
        groups.setdefault(json.dumps([case.before, case.world], sort_keys=True), []).append(case)
    parts: list[list[Case]] = [[] for _ in range(workers)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts


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
            asked = "".join(json.dumps([case.name, case.before, case.after, case.world]) + "\n" for case in part)
            stdin = worker.stdin
            feeding = threading.Thread(target=lambda: (stdin.write(asked), stdin.close()))
            feeding.start()
            answers = [json.loads(line[6:]) for line in worker.stdout if line.startswith("EFFECT")]
            feeding.join()
        assert len(answers) == len(part), "the worker did not come to its end"
        return answers

    with ThreadPoolExecutor(workers) as pool:
        for answers in pool.map(work, in_parts(tried, workers)):
            yield from answers


def unchanged(tried: Iterable[Case]) -> Iterator[Case]:
    """Each first configuration beside itself: what differs there would be taken for the effect of a key."""
    seen = set()
    for case in tried:
        if (known := json.dumps([case.before, case.world], sort_keys=True)) not in seen:
            seen.add(known)
            yield replace(case, name=f"nothing of {case.name}", after=case.before)


def verdict(case: Case, did: list[str], held: list[str], said: list[str], error: str, before: str) -> str:
    """What a key does, "" where it is silent."""
    if before:
        return "" if error else "trains, where without it: " + before.strip().splitlines()[-1][:100]
    if error:
        return "error: " + error.strip().splitlines()[-1][:120]
    told = [line for line in said if case.key[-1] in line]
    if did or told:
        return (did or told)[0][:120]
    return f"{HELD}{held[0][:120]}" if held else ""


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
        elif case.name in IDLE:
            table[case.name] = f"{HELD}{IDLE[case.name]}"
        elif is_excused(".".join(case.key)):
            table[case.name] = "not to be seen: " + next(
                why for known, why in NOT_TO_BE_SEEN.items() if f"{'.'.join(case.key)}.".startswith(f"{known}.")
            )
        else:
            tried.append(case)
    by_name = {case.name: case for case in tried}
    answers = {name: answer for name, *answer in effects([*tried, *unchanged(tried)])}
    for name, case in by_name.items():
        table[name] = verdict(case, *answers.pop(name))
    for name, what in table.items():
        print(f"{name} | {what}")
    for name, (did, held, _, error, before) in answers.items():
        assert not did + held, f"{name}, beside itself: {did}{held}"
        assert error.splitlines()[-1:] == before.splitlines()[-1:], f"{name}: {error}{before}"
    silent = [name for name, what in table.items() if not what]
    assert not silent, f"{len(silent)} keys change nothing, and nobody says so: {silent}"
    done = {case.key for case in cases() if not table[case.name].startswith(HELD)}
    idle = {".".join(case.key) for case in by_name.values() if case.key not in done}
    assert idle == set(ONLY_HELD), f"objects have these values, and nothing is done with them: {idle ^ set(ONLY_HELD)}"
