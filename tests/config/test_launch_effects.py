"""Every launch key that asks for something changes the launch, is followed by a run that is named, or is warned of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.document import ENVIRONMENT_VARIABLE
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING, LaunchSettings
from zero_plugin.config.read import document_from_mapping
from zero_plugin.launch.build import build_spec
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
# key -> (what surrounds it, a value that asks for something)
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
    "deepspeed_hostfile": ({"num_processes": 4}, "hosts"),
    "deepspeed_multinode_launcher": (HOSTS, "openmpi"),
    "deepspeed_exclusion_filter": ({"deepspeed_hostfile": "hosts"}, "b"),
    "deepspeed_inclusion_filter": ({"deepspeed_hostfile": "hosts"}, "a"),
}
NOTHING_TO_FOLLOW: Final = ("same_network",)  # a fact, which Accelerate's files tell of every run
# key -> who follows it in a run, for those that the launcher only hands over
FOLLOWED_BY_RUNS: Final[Mapping[str, str]] = {
    "auto_resume": "accelerator.resume()",
    "main_training_function": "a launch on a TPU and notebook_launcher, which call it",
    "scheduler_counts": "accelerator.prepare(), for schedules",
    "deepspeed_moe_layer_cls_names": "accelerator.prepare() at stage 3",
    "gpu_memory": "the plan of stage auto",
    "host_memory": "the plan of stage auto",
    "zero3_init_flag": "Accelerator() at stage 3, for transformers' from_pretrained",
}


def launched(config: Mapping[str, Any]) -> dict[str, Any]:
    """The launch of a configuration without the document that it hands over and what is new in every launch."""
    document = document_from_mapping({name: value for name, value in config.items() if value is not None}, "code")
    spec = build_spec(document, Program("train.py"), Machine(4, 8), {})
    found = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "document"}
    found["rendezvous"] = replace(spec.rendezvous, run_id="")
    found["environment"] = {name: value for name, value in spec.environment.items() if name != ENVIRONMENT_VARIABLE}
    if spec.hosts is not None:  # in its command the document is the one long word
        command = tuple(part for part in spec.hosts.command if len(part) < 100 and spec.hosts.run not in part)
        found["hosts"] = replace(spec.hosts, run="", command=command)
    return found


def warned(config: Mapping[str, Any], key: str) -> list[str]:
    """What is said of a key, but for notes."""
    document = document_from_mapping({name: value for name, value in config.items() if value is not None}, "code")
    return [str(problem) for problem in find_problems(document) if problem.severity != "note" and problem.key == key]


def test_every_launch_key_is_in_one_table() -> None:
    """A new key has to say here how it is followed."""
    assert sorted([*ASKED, *FOLLOWED_BY_RUNS, *NOTHING_TO_FOLLOW]) == sorted(LaunchSettings.model_fields)


@pytest.mark.parametrize("key", ASKED)
def test_launch_keys_are_followed(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key changes the launch, beside the document that is handed over, or a warning says that it does not."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    Path("train.py").write_text("")
    around, value = ASKED[key]
    before, after = launched(around), launched({**around, key: value})
    changed = [name for name in before if before[name] != after[name]]
    said = warned({**around, key: value}, key)
    print(f"{key} | {', '.join(changed) or ' '.join(said)}")
    assert changed or said, f"{key}: {value} changes nothing, and nobody says so"


@pytest.mark.parametrize("key", [*WITHOUT_MEANING, *REFUSED_KEYS])
def test_keys_that_are_not_followed_are_spoken_of(key: str) -> None:
    """Each key of Accelerate's that is taken and not followed is warned of, or an error."""
    leaf = {"parallelism_config": {"parallelism_config_tp_size": 2}, "ipex_config": {"ipex": True}}
    leaf |= {"mpirun_config": {"mpirun_hostfile": "hosts"}, "tpu_use_cluster": True, "tpu_use_sudo": True}
    document = document_from_mapping({"num_processes": 1, key: leaf.get(key, "something")}, "code")
    assert [p for p in find_problems(document) if p.severity != "note" and p.key.split(".")[0] == key]
