"""Every key of DeepSpeed's configuration changes a run, or `check` or the run reports it.

The campaign has a test for each section of the schema, which runs real engines on the CPU. With `-rP` pytest shows the
tables, key | what changed. The ordinary suite asks `check` alone.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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

# Keys, or complete sections, whose effect is invisible here: the reason.
NOT_TO_BE_SEEN: Final[Mapping[str, str]] = {
    "managed_gradient_accumulation": "false is what runs; true is an error",
    "zero_force_ds_cpu_optimizer": "false is what runs",
    "expert_parallel": "is an error",
    "use_data_before_expert_parallelism": "only models with mixture-of-experts layers read it",
    "zero_optimization.zenflow": "is an error",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "transformers' Trainer saves by it",
    "zero_optimization.zero_hpz_partition_size": "one process is one node",
    "weight_quantization.quantized_initialization": "needs a GPU",
    "hybrid_engine": "needs a GPU",
    "data_efficiency.data_routing.random_ltd": "needs a GPU",
    "data_efficiency.enabled": "a switch of what is below it",
    "data_efficiency.data_routing.enabled": "a switch of what is below it",
    "wandb": "needs a login",
    "comet": "needs a package that is not installed",
}
_CHECKPOINTS: Final = "read where the model calls deepspeed.checkpointing.checkpoint, of which a note speaks"
# Keys, or single cases of them, whose value is visible only inside an engine: the reason.
ONLY_HELD: Final[Mapping[str, str]] = {
    "zero_optimization.log_trace_cache_warnings": "warns where a model runs its modules in another order than before",
    **dict.fromkeys(
        ("zero_optimization.overlap_comm [zero3]", "zero_optimization.overlap_comm [own0]"),
        "a CPU has no streams, and stage 3 has no second bucket",
    ),
    "zero_optimization.offload_optimizer.fast_init": "groups of less than a mebibyte are not swapped",
    "zero_optimization.stage3_prefetch_bucket_size [zero3]": "all weights persist",
    "zero_optimization.stage3_max_live_parameters [zero3]": "all weights persist",
    "zero_optimization.stage3_model_persistence_threshold [own0]": "no weight is below the threshold of one",
    **{
        f"activation_checkpointing.{key} [own0]": _CHECKPOINTS
        for key in ("number_checkpoints", "synchronize_checkpoint_boundary", "profile", "cpu_checkpointing")
    },
    "optimizer.params.t0 of ASGD": "ASGD keeps an average of the weights from then on, in its state",
}
# Cases in which a key has no effect, although it has one in others: the reason.
IDLE: Final[Mapping[str, str]] = {
    "optimizer.params.torch_adam of AdamW [zero2]": "on a CPU without offload torch's runs anyway",
}
# Keys that exist for their output. Calls that lead to an invisible line are no effect.
PRINTING: Final = (
    *("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "log_level", "comms_logger.verbose"),
)
HELD: Final = "only held: "
SECONDS: Final = 7200


def is_excused(key: str) -> bool:
    """Return whether a key is in the table, alone or with its section."""
    return any(f"{key}.".startswith(f"{known}.") for known in NOT_TO_BE_SEEN)


_PROBLEMS: dict[str, set[str]] = {}


def problems(config: dict[str, Any]) -> set[str]:
    """Return `check`'s findings for a configuration. Many cases start from the same one."""
    if (known := repr(config)) not in _PROBLEMS:
        try:
            found: Iterable[Any] = find_problems(document_from_mapping(config, "code"))
        except ConfigError as error:
            found = error.problems
        _PROBLEMS[known] = {f"{p.severity}: {p.key}: {p.message}" for p in found if p.severity != "note"}
    return _PROBLEMS[known]


def spoken(case: Case) -> list[str]:
    """Return the findings that `check` adds because of the key."""
    new = problems(case.after) - problems(case.before)
    faulty = [line for line in new if "unknown key" in line or "is not legal here" in line]
    assert not faulty, f"{case.name}: the table's value is none: {faulty}"
    # If a complete section has no effect, the finding is the same with or without one more of its keys.
    sections = [".".join(case.key[:n]) for n in range(1, len(case.key))]
    idle = [line for line in problems(case.after) if any(f": {one}: has no effect" in line for one in sections)]
    return sorted(new) or sorted(idle)


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """Return every key in each of its surroundings."""
    return tuple(cases())


def section_of(case: Case) -> str:
    """Return the part of the schema with which a case is tried. All cases of a key are in one."""
    top, *below = case.key
    if not below:
        return "top level"
    if top == "zero_optimization" and below[0].startswith("stage3_"):
        return "zero_optimization.stage3_"
    return f"{top}.{below[0]}" if len(below) > 1 and top in ("zero_optimization", "data_efficiency") else top


SECTIONS: Final = tuple(dict.fromkeys(map(section_of, all_cases())))


def first_configuration(case: Case) -> str:
    """Return the configuration that a case shares with others, which is trained once for all of them."""
    return json.dumps([case.before, case.world], sort_keys=True)


class Workers:
    """Processes of `effect_worker.py`. Cases with one first configuration go to one process, which trains it once.

    Attributes:
        folder: folder of their output.
        count: number of processes.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._answers: dict[str, list[Any]] = {}
        self._owners: dict[str, int] = {}
        self._outputs = [folder / f"worker{n}" for n in range(count)]
        self._running = ExitStack()
        self._processes = [self._start(output) for output in self._outputs]

    def _start(self, output: Path) -> subprocess.Popen[str]:
        file = self._running.enter_context(output.open("w"))
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("effect_worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, bufsize=1,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def answers(self, tried: Sequence[Case]) -> dict[str, list[Any]]:
        """Return the workers' answers to the cases, by name. Earlier cases are not tried again."""
        asked = {case.name: json.dumps([case.before, case.after, case.world], sort_keys=True) for case in tried}
        new = {known: case for case in tried if (known := asked[case.name]) not in self._answers}
        parts: list[list[Case]] = [[] for _ in self._processes]
        groups: dict[str, list[Case]] = {}
        for case in new.values():
            groups.setdefault(first_configuration(case), []).append(case)
        for first, group in sorted(groups.items(), key=lambda item: -len(item[1])):
            least = min(range(len(parts)), key=lambda n: len(parts[n]))
            parts[self._owners.setdefault(first, least)].extend(group)
        with ThreadPoolExecutor(len(parts)) as pool:
            try:
                list(pool.map(self._ask, range(len(parts)), parts))
            except BaseException:  # such as the time limit's; the pool would wait for all remaining cases
                for process in self._processes:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return {name: self._answers[known] for name, known in asked.items()}

    def _ask(self, number: int, part: list[Case]) -> None:
        process = self._processes[number]
        assert process.stdin is not None
        assert process.stdout is not None
        for case in part:
            process.stdin.write(json.dumps([case.name, case.before, case.after, case.world]) + "\n")
            answer = next((line for line in process.stdout if line.startswith("EFFECT")), None)
            assert answer is not None, f"{case.name}: the worker has ended: {self._outputs[number].read_text()[-2000:]}"
            known = json.dumps([case.before, case.after, case.world], sort_keys=True)
            self._answers[known] = json.loads(answer[6:])[1:]

    def end(self) -> None:
        """Wait for the processes, which end after the last case."""
        for process in self._processes:
            process.communicate()
        self._running.close()


@pytest.fixture(scope="module")
def workers(built_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Start two processes, or one in each of several pytest processes."""
    folder = tmp_path_factory.mktemp("effects")
    running = Workers(folder, 1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield running
    running.end()


def unchanged(tried: Iterable[Case]) -> Iterator[Case]:
    """Pair each first configuration with itself: a difference would be taken for a key's effect."""
    for case in {first_configuration(case): case for case in reversed(tuple(tried))}.values():
        yield replace(case, name=f"nothing of {case.name}", after=case.before)


def verdict(case: Case, did: list[str], held: list[str], said: list[str], error: str, before: str) -> str:
    """Return a key's effect, or "" if it is silent."""
    if before:
        return "" if error else "trains, where without it: " + before.strip().splitlines()[-1][:100]
    if error:
        return "error: " + error.strip().splitlines()[-1][:120]
    if ".".join(case.key) in PRINTING:
        did, held = [line for line in did if line.startswith(("printed", "files"))], []
    told = [line for line in said if re.search(rf"\b{re.escape(case.key[-1])}\b", line)]
    seen = [line for line in did if not line.startswith("calls")]
    found = seen or told or did
    return found[0][:120] if found else f"{HELD}{held[0][:120]}" if held else ""


def test_excused_keys_exist() -> None:
    """The tables name only keys of DeepSpeed, and only cases that are tried."""
    known = {".".join(path) for path, _ in walk_keys(deepspeed_schema())}
    assert set(NOT_TO_BE_SEEN) <= known
    names = {case.name for case in all_cases()}
    assert set(ONLY_HELD) <= names | {name.partition(" [")[0] for name in names}
    assert set(IDLE) <= names


def test_a_sample_of_keys_is_legal_beside_what_check_says() -> None:
    """Each finding of `check` is about the key itself, or about another key's value that contradicts it."""
    for case in random.Random(17).sample(all_cases(), 60):
        spoken(case)


# Keys, or complete sections, that `check` does not report in a run without DeepSpeed: the reason.
WITHOUT_ENGINE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            *("optimizer", "scheduler", "fp16", "bf16.enabled", "bf16.check_grad_overflow", "sequence_parallel_size"),
        ),
        "followed",
    ),
    **dict.fromkeys(("zero_optimization", "aio"), "the run says that ZeRO is dropped, with its offload"),
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation"),
        "says what is so without ZeRO",
    ),
    **dict.fromkeys(("data_efficiency.enabled", "data_efficiency.data_routing.enabled"), "switches what is below it"),
}


def test_no_key_of_the_engine_is_silent_without_it() -> None:
    """Without DeepSpeed each key is followed, or is an error or a warning.

    Only ZeRO is dropped with a line of the run.
    """
    silent, plain = set(), {"distributed_type": "MULTI_CPU"}
    for case in all_cases():
        tried = replace(case, before={**case.before, **plain}, after={**case.after, **plain})
        key, lines = ".".join(case.key), spoken(replace(tried, before=plain))
        if not any(line.startswith("error") or f": {key}: " in line for line in lines) and not spoken(tried):
            silent.add(next((known for known in WITHOUT_ENGINE if f"{key}.".startswith(f"{known}.")), key))
    assert silent == set(WITHOUT_ENGINE)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("section", SECTIONS)
def test_no_key_is_silent(section: str, workers: Workers) -> None:
    """Each key in each of its surroundings changes the optimizer, hooks, files, memory or calls, or is reported.

    A first configuration compared with itself does not differ.
    """
    table, tried = {}, []
    of_this = [case for case in all_cases() if section_of(case) == section]
    for case in of_this:
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
    same = list(unchanged(tried))
    answers = workers.answers([*tried, *same])
    for case in tried:
        did, held, said, error, before = answers[case.name]
        table[case.name] = verdict(case, did, held, said, error, before)
    for name, what in table.items():
        print(f"{name} | {what}")
    faults = []
    for case in same:
        did, held, _, error, before = answers[case.name]
        if did + held or error.splitlines()[-1:] != before.splitlines()[-1:]:
            faults.append(f"{case.name}, with itself: {did}{held}{error}{before}")
    faults += [f"{name} changes nothing, and no message says so" for name, what in table.items() if not what]
    idle = [case.name for case in tried if table[case.name].startswith(HELD)]
    excused = {name: {name, name.partition(" [")[0]} & set(ONLY_HELD) for name in idle}
    faults += [f"{name}: objects hold it, and nothing is done with it" for name, why in excused.items() if not why]
    used = set[str]().union(*excused.values())
    names = {name for case in of_this for name in (case.name, case.name.partition(" [")[0])}
    faults += [f"{name}: ONLY_HELD says so wrongly" for name in ONLY_HELD if name in names - used]
    assert not faults, "\n".join(faults)
