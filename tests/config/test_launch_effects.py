"""Every launch key with an effect changes the launch, is followed by a named run, or is warned about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

from zero_plugin.config.check import check_document, find_problems
from zero_plugin.config.document import ENVIRONMENT_VARIABLE
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING
from zero_plugin.config.read import document_from_mapping
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.remote_worker import decode_config
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import Machine

ONE: Final = {"use_cpu": True, "num_processes": 2}
GPUS: Final = {"num_processes": 2}
MANY: Final = {
    "num_processes": 4,
    "num_machines": 2,
    "machine_rank": 0,
    "main_process_ip": "10.0.0.1",
    "rdzv_backend": "c10d",
}
HOSTS: Final = {"num_processes": 4, "deepspeed_hostfile": "hosts"}
# key -> (its surroundings, a value with an effect)
ASKED: Final[Mapping[str, tuple[Mapping[str, Any], Any]]] = {
    "distributed_type": (ONE, "DEEPSPEED"),
    "mixed_precision": (ONE, "bf16"),
    "num_processes": ({"use_cpu": True}, 3),
    "num_machines": ({**MANY, "num_machines": 1}, 2),
    "min_machines": ({**MANY, "max_restarts": 1}, 1),
    "machine_rank": ({**MANY, "rdzv_backend": "static"}, 1),
    "main_process_ip": (MANY, "10.0.0.2"),
    "main_process_port": (MANY, 29511),
    "rdzv_backend": ({**MANY, "rdzv_backend": "static"}, "c10d"),
    "rdzv_conf": (MANY, "timeout=60"),
    "gpu_ids": ({}, "0,1"),
    "use_cpu": (GPUS, True),
    "enable_cpu_affinity": (ONE, True),
    "num_cpu_threads_per_process": (ONE, 7),
    "max_restarts": (ONE, 2),
    "grace_period": (ONE, 5.0),
    "monitor_interval": (ONE, 2.0),
    "log_dir": (ONE, "logs"),
    "tee": (ONE, 3),
    "role": (ONE, "trainer"),
    "debug": (ONE, True),
    "quiet": (ONE, True),
    "verbose": (ONE, True),
    "log_timestamps": (ONE, True),
    "deepspeed_hostfile": ({"num_processes": 4}, "hosts"),
    "deepspeed_multinode_launcher": (HOSTS, "openmpi"),
    "deepspeed_exclusion_filter": ({"deepspeed_hostfile": "hosts"}, "b"),
    "deepspeed_inclusion_filter": ({"deepspeed_hostfile": "hosts"}, "a"),
}
# key -> its reader in a run if the launcher only passes it on; and a value with an effect
FOLLOWED_BY_RUNS: Final[Mapping[str, tuple[str, Any]]] = {
    "auto_resume": ("accelerator.resume()", True),
    "prefer": ("Accelerator(), for arguments that differ", "code"),
    "main_training_function": ("a launch on a TPU, which calls it", "train"),
    "scheduler_counts": ("accelerator.prepare(), for schedules", "steps"),
    "checks": ("accelerator.prepare(), for its guards", "start"),
    "deepspeed_moe_layer_cls_names": ("accelerator.prepare() with ZeRO", "Block"),
    "gpu_memory": ("the plan of stage auto", "20GiB"),
    "host_memory": ("the plan of stage auto", "64GiB"),
    "network": ("the plan of stage auto", "400Gb"),
    "zero3_init_flag": ("Accelerator() at stage 3, for transformers' from_pretrained", True),
}
# key -> why no launch follows it: each of several machines is warned about it
FOLLOWED_BY_NOBODY: Final[Mapping[str, tuple[str, Any]]] = {"same_network": ("a fact, of which nothing follows", True)}
VALUES: Final = {
    **{key: value for key, (_, value) in ASKED.items()},
    **{key: value for key, (_, value) in (*FOLLOWED_BY_RUNS.items(), *FOLLOWED_BY_NOBODY.items())},
}

CPUS, SERVER, TPU = Machine(0, 8), Machine(4, 8), Machine(0, 8, tpu="4 TPU chips")
ZERO: Final = {"distributed_type": "DEEPSPEED", "num_processes": 2}
DDP: Final = {"distributed_type": "MULTI_GPU", "num_processes": 4}
# Kinds of launches, each with its machine.
LAUNCHES: Final[Mapping[str, tuple[Mapping[str, Any], Machine]]] = {
    "one process": ({"distributed_type": "NO", "use_cpu": True, "num_machines": 1}, CPUS),
    "the CPU": ({"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "num_machines": 1}, CPUS),
    "GPUs": ({**DDP, "num_machines": 1}, SERVER),
    "stage 2": ({**ZERO, "num_machines": 1, "deepspeed_config": {"zero_stage": 2}}, SERVER),
    "stage 3": ({**ZERO, "num_machines": 1, "deepspeed_config": {"zero_stage": 3}}, SERVER),
    "a plan": ({**ZERO, "num_machines": 1, "deepspeed_config": {"zero_stage": "auto"}}, SERVER),
    "a static rendezvous": ({**DDP, **MANY, "rdzv_backend": "static"}, SERVER),
    "c10d": ({**DDP, **{key: value for key, value in MANY.items() if key != "machine_rank"}}, SERVER),
    "pdsh": ({"distributed_type": "DEEPSPEED", "deepspeed_hostfile": "hosts"}, SERVER),
    "nossh": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_hostfile": "hosts",
            "deepspeed_multinode_launcher": "nossh",
            "machine_rank": 0,
        },
        SERVER,
    ),
    "a TPU": ({"distributed_type": "XLA", "num_machines": 2}, TPU),
}
_SAME_COUNT: Final = "the hostfile has as many"
# (key, launch) -> why a value with an effect is neither followed nor reported there
SAYS_WHAT_IS: Final[Mapping[tuple[str, str], str]] = {
    ("num_machines", "pdsh"): _SAME_COUNT,
    ("num_machines", "nossh"): _SAME_COUNT,
    **{
        ("min_machines", launch): "one of one machine"
        for launch in ("one process", "the CPU", "GPUs", "stage 2", "stage 3", "a plan")
    },
    **{
        ("same_network", launch): "one machine, of which Accelerate's files tell it too"
        for launch in ("one process", "the CPU", "GPUs", "stage 2", "stage 3", "a plan")
    },
}


# Settings that torchrun's engine gets unchanged.
OF_TORCHRUN: Final = ("debug", "grace_period", "log_dir", "max_restarts", "monitor_interval", "role", "tee")


def launched(config: Mapping[str, Any], machine: Machine = SERVER) -> dict[str, Any]:
    """Return the launch without the document that it passes on and without values that every launch renews."""
    document = document_from_mapping({name: value for name, value in config.items() if value is not None}, "code")
    check_document(document)
    spec = build_spec(document, Program("train.py"), machine, {})
    found = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "document"}
    found["rendezvous"] = replace(spec.rendezvous, run_id="")
    found["environment"] = {name: value for name, value in spec.environment.items() if name != ENVIRONMENT_VARIABLE}
    if spec.hosts is not None:  # in its command the document is the one long word
        command = tuple(part for part in spec.hosts.command if len(part) < 100 and spec.hosts.run not in part)
        bound = decode_config(spec.hosts.command[-1]).bind
        found["hosts"] = (replace(spec.hosts, run="", command=command), bound)
    found["settings"] = spec.settings.model_dump(include=set(OF_TORCHRUN)) if spec.hosts is None else {}
    found["least"] = spec.settings.min_machines or spec.machines
    return found


def warned(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the findings about a key, without notes."""
    document = document_from_mapping({name: value for name, value in config.items() if value is not None}, "code")
    return [str(problem) for problem in find_problems(document) if problem.severity != "note" and problem.key == key]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero_plugin.launch.tpu.find_version_problem", lambda: "")
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    Path("train.py").write_text("def main():\n    pass\n\n\ndef train():\n    pass\n")


def test_every_launch_key_is_in_one_table() -> None:
    """A new key must state in a table how it is followed."""
    assert sorted([*ASKED, *FOLLOWED_BY_RUNS, *FOLLOWED_BY_NOBODY]) == sorted(LaunchSettings.model_fields)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("key", ASKED)
def test_launch_keys_are_followed(key: str) -> None:
    """The key changes more of the launch than the document, or a warning says that it does not."""
    around, value = ASKED[key]
    before, after = launched(around), launched({**around, key: value})
    changed = [name for name in before if before[name] != after[name]]
    said = warned({**around, key: value}, key)
    print(f"{key} | {', '.join(changed) or ' '.join(said)}")
    assert changed or said, f"{key}: {value} changes nothing, and no message says so"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("key", LaunchSettings.model_fields)
def test_no_kind_of_launch_passes_over_a_key(key: str, launch: str) -> None:
    """Each key changes the launch, is an error or a warning, or is followed by the run. No excuse is superfluous."""
    around, machine = LAUNCHES[launch]
    asked = {**around, key: VALUES[key]}
    if asked == around:
        return
    before = launched(around, machine)
    try:
        after = launched(asked, machine)
    except ConfigError:
        return
    changed = [name for name in before if before[name] != after[name]]
    found = changed or warned(asked, key)
    print(f"{key} [{launch}] | {found or FOLLOWED_BY_RUNS.get(key)}")
    if key not in FOLLOWED_BY_RUNS:
        assert bool(found) is ((key, launch) not in SAYS_WHAT_IS), f"{key}: {VALUES[key]}"


@pytest.mark.parametrize(
    ("key", "launches"),
    {
        "auto_resume": set(LAUNCHES),
        "scheduler_counts": set(LAUNCHES),
        "checks": set(LAUNCHES),
        "main_training_function": {"a TPU"},
        "deepspeed_moe_layer_cls_names": {"stage 2", "stage 3", "a plan", "pdsh", "nossh"},
        "zero3_init_flag": {"stage 3", "a plan"},
        "gpu_memory": {"a plan"},
        "host_memory": {"a plan"},
        "network": set(),  # the plan here is for one machine
    }.items(),
)
def test_what_a_run_does_not_follow_is_warned_of(key: str, launches: set[str]) -> None:
    """The launcher warns of a key exactly where no run reads it."""
    assert {name for name, (around, _) in LAUNCHES.items() if not warned({**around, key: VALUES[key]}, key)} == launches


@pytest.mark.parametrize("key", [*WITHOUT_MEANING, *REFUSED_KEYS])
def test_keys_that_are_not_followed_are_spoken_of(key: str) -> None:
    """Each accepted key of Accelerate's that is not followed is warned about, or an error."""
    leaf = {"parallelism_config": {"parallelism_config_tp_size": 2}, "ipex_config": {"ipex": True}}
    leaf |= {"mpirun_config": {"mpirun_hostfile": "hosts"}, "tpu_use_cluster": True, "tpu_use_sudo": True}
    document = document_from_mapping({"num_processes": 1, key: leaf.get(key, "something")}, "code")
    assert [p for p in find_problems(document) if p.severity != "note" and p.key.split(".")[0] == key]
