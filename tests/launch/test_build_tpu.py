"""A launch on a TPU is decided completely before the start: one worker, in which torch_xla starts the copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import shell_script, worker_command
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.machine.hardware import Machine
from zero_plugin.machine.xla_runtime import find_version_problem

TPU_HOST = Machine(gpus=0, cores=96, tpu="4 TPU chips on the PCI bus")
LAPTOP = Machine(gpus=0, cores=8)
MAIN = "def main():\n    pass\n"
_NO_ZERO = "ZeRO stage 2 dropped, as"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the extra `tpu` is installed. The tests in tests/xla have it."""
    monkeypatch.setattr("zero_plugin.launch.tpu.find_version_problem", lambda: "")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(MAIN)
    return file


def document(**launch: Any) -> Document:
    return Document().overlay("file", {(key,): ("c.yaml:1:1", value) for key, value in launch.items()})


def build(script: Path, machine: Machine = TPU_HOST, environ: dict[str, str] | None = None, **keys: Any) -> LaunchSpec:
    return build_spec(document(**keys), Program(str(script), ("--lr", "1")), machine, environ or {})


@pytest.mark.parametrize("kind", ["TPU", "XLA"])
@pytest.mark.parametrize(("count", "shown"), [(None, "all"), (1, "1"), (32, "32")])
def test_one_worker_for_all_devices(script: Path, kind: str, count: int | None, shown: str) -> None:
    """torchrun never starts several, whatever the requested number. torch_xla gets that number."""
    spec = build(script, distributed_type=kind, num_processes=count, num_machines=1)
    assert (spec.local_processes, spec.machines) == (1, 1)
    assert worker_command(spec)[-6:] == ["--replicas", shown, "main", str(script), "--lr", "1"]
    assert spec.environment["PJRT_DEVICE"].value == "TPU"
    assert spec.environment["PJRT_DEVICE"].reason == TPU_HOST.tpu
    assert "DS_ACCELERATOR" not in spec.environment


def test_an_empty_variable_is_an_open_one(script: Path) -> None:
    """`PJRT_DEVICE=` chooses no device, so the worker gets the detected TPU."""
    spec = build(script, environ={"PJRT_DEVICE": ""}, distributed_type="TPU")
    assert spec.environment["PJRT_DEVICE"].value == "TPU"


def test_machines_are_connected_by_the_runtime(script: Path) -> None:
    """Each machine starts its own worker without waiting for others.

    The requested number counts all devices together.
    """
    spec = build(script, distributed_type="TPU", num_processes=16, num_machines=4, machine_rank=0, same_network=True)
    assert (spec.local_processes, spec.machines) == (1, 1)
    assert spec.replicas is not None
    assert spec.replicas.count == 16


def test_on_the_cpu_the_runtime_is_told_how_many(script: Path) -> None:
    """`PJRT_DEVICE=CPU` tries the path: with the requested number of devices, the environment's, or one."""
    chosen = {"PJRT_DEVICE": "CPU"}
    asked = build(script, LAPTOP, chosen, distributed_type="TPU", num_processes=2)
    assert (asked.environment["CPU_NUM_DEVICES"].value, worker_command(asked)[-5]) == ("2", "2")
    kept = build(script, LAPTOP, {**chosen, "CPU_NUM_DEVICES": "3"}, distributed_type="TPU")
    assert ("CPU_NUM_DEVICES" in kept.environment, worker_command(kept)[-5]) == (False, "3")
    for environ in (chosen, {**chosen, "CPU_NUM_DEVICES": ""}):
        assert worker_command(build(script, LAPTOP, environ, distributed_type="TPU"))[-5] == "1"
    assert "PJRT_DEVICE" not in asked.environment


def test_dry_run_shows_what_runs(script: Path) -> None:
    """It shows the variables with reasons and an equivalent command, without torchrun, which would start copies."""
    lines = shell_script(build(script, distributed_type="TPU", num_processes=4)).splitlines()
    assert "export PJRT_DEVICE=TPU" in lines
    assert f"# {TPU_HOST.tpu}" in lines
    assert lines[-1].startswith("python -u ")
    assert lines[-1].endswith(f"worker.py --replicas 4 main {script} --lr 1")


def test_a_tpu_is_taken_where_nothing_is_said(script: Path) -> None:
    """A TPU is used like a GPU, and the workers get the choice. A GPU, `--cpu` or a written kind takes precedence."""
    spec = build(script)
    assert spec.replicas is not None
    kind = spec.document.launch.get("distributed_type")
    assert kind is not None
    assert (kind.value, kind.origin.reason) == ("XLA", TPU_HOST.tpu)
    assert '"XLA"' in spec.environment[ENVIRONMENT_VARIABLE].value
    assert build(script, use_cpu=True).replicas is None
    assert build(script, distributed_type="NO").replicas is None
    assert build(script, Machine(1, 8, TPU_HOST.tpu)).replicas is None


def test_zero_is_not_dropped_unasked(script: Path) -> None:
    """ZeRO on a TPU-only machine is an error with two fixes. With --tpu ZeRO is dropped, which is logged."""
    with pytest.raises(ConfigError, match=r"c\.yaml:1:1: distributed_type: ZeRO runs on GPUs.*\n.*--tpu.*use_cpu"):
        build(script, distributed_type="DEEPSPEED")
    assert build(script, distributed_type="DEEPSPEED", use_cpu=True).replicas is None


@pytest.mark.parametrize(
    ("keys", "environ", "parts"),
    [
        ({}, {"PJRT_DEVICE": "CUDA"}, ["PJRT_DEVICE: CUDA is no TPU", "Unset PJRT_DEVICE"]),
        ({}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "two"}, ["CPU_NUM_DEVICES: two is no number", "Unset"]),
        ({"use_cpu": True}, {}, ["c.yaml:1:1: use_cpu: contradicts the TPU", "Delete one"]),
        ({"gpu_ids": "0,1"}, {}, ["gpu_ids: has no effect on a TPU", "TPU_VISIBLE_CHIPS"]),
        ({"enable_cpu_affinity": True}, {}, ["enable_cpu_affinity: has no effect on a TPU"]),
        ({"num_machines": 2, "main_process_ip": "10.0.0.1"}, {}, ["main_process_ip: has no effect", "num_processes"]),
        ({"num_machines": 4, "min_machines": 2}, {}, ["min_machines: has no effect on a TPU", "all its machines"]),
        (
            {"num_machines": 4, "machine_rank": 2},
            {},
            ["machine_rank: has no effect on a TPU", "num_processes"],
        ),
        ({"num_machines": 4, "rdzv_backend": "c10d"}, {}, ["rdzv_backend: has no effect on a TPU", "num_processes"]),
        ({"deepspeed_hostfile": "hosts"}, {}, ["deepspeed_hostfile: has no effect", "--worker=all"]),
        ({"mixed_precision": "fp16"}, {}, ["fp16 is on, but a TPU computes in bf16", "Write bf16 or no"]),
        ({"main_training_function": "train"}, {}, ["train.py has no function train", "main_training_function"]),
        ({"log_dir": __file__}, {}, ["log_dir: ", "is no folder"]),
        ({"dynamo_backend": "INDUCTOR"}, {}, ["dynamo_backend: inductor does not compile for a TPU", "Leave it out"]),
    ],
    ids=str,
)
def test_what_cannot_run(script: Path, keys: dict[str, Any], environ: dict[str, str], parts: list[str]) -> None:
    """The error comes before any process starts and names the key, its place, and what to write."""
    with pytest.raises(ConfigError) as caught:
        build(script, environ=environ, **{"distributed_type": "TPU", **keys})
    assert len(caught.value.problems) == 1
    for part in parts:
        assert part in str(caught.value)


def test_no_tpu_here(script: Path) -> None:
    """The error comes before torch_xla would silently use the CPU, and tells how to try without a TPU."""
    with pytest.raises(ConfigError, match=r"c\.yaml:1:1: .*there is no TPU here\n.*PJRT_DEVICE=CPU"):
        build(script, LAPTOP, distributed_type="TPU")


@pytest.mark.parametrize(
    "text",
    ["from elsewhere import main", "import elsewhere as main", "main = print", "from x import *", "if 1:\n " + MAIN],
)
def test_a_function_that_may_be_there_is_taken(script: Path, text: str) -> None:
    """Only a name that no line of the script binds is an error. The worker checks the rest."""
    script.write_text(text.replace("\n    pass", " pass"))
    assert build(script, distributed_type="TPU").replicas is not None


@pytest.mark.parametrize("content", [b"def main(:", b"\0"])
def test_what_is_no_python_is_left_to_the_worker(script: Path, content: bytes) -> None:
    """The worker shows the line. Older Pythons report a null byte as a wrong value, not as wrong syntax."""
    script.write_bytes(content)
    assert build(script, distributed_type="TPU").replicas is not None


def test_an_executable_has_no_function(script: Path) -> None:
    """`--no_python` cannot go to a TPU."""
    with pytest.raises(ConfigError, match="--no_python: a TPU launch calls a function"):
        build_spec(document(distributed_type="TPU"), Program("ls", (), "executable"), TPU_HOST, {})


def test_the_flag_overrides_a_file_for_gpus(tmp_path: Path, script: Path) -> None:
    """With `--tpu`, a ZeRO config or a ZeRO flag runs without ZeRO. `--cpu` with `--tpu` is a contradiction."""
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config: {zero_stage: 2}")
    for flags in ({"config_file": str(tmp_path / "zero.yaml")}, {"zero_stage": "3"}):
        spec = build_spec(document_from_flags({**flags, "tpu": True}), Program(str(script)), TPU_HOST, {})
        assert spec.replicas is not None
        assert spec.deepspeed_config is None
        assert spec.environment.get("ACCELERATE_USE_DEEPSPEED") is None
    with pytest.raises(ConfigError, match=r"--cpu: contradicts --tpu"):
        document_from_flags({"tpu": True, "cpu": True})


@pytest.mark.parametrize(
    ("versions", "parts"),
    [
        ({"torch": "2.9.0"}, ["torch_xla, which is not installed", "pip install 'zero-plugin[tpu]'"]),
        ({"torch": "2.13.0", "torch_xla": "2.9.0"}, ["built for torch 2.9, and this is torch 2.13.0", "[tpu]"]),
    ],
)
def test_versions_that_do_not_go_together(versions: dict[str, str], parts: list[str]) -> None:
    """The packages' metadata shows it. Importing the pair would fail with an undefined symbol."""
    problem = find_version_problem(versions.get)
    for part in parts:
        assert part in problem


@pytest.mark.parametrize(("torch", "xla"), [("2.9.0", "2.9.0"), ("2.9.1+cpu", "2.9.0"), ("2.9.0", "2.9.0.post1")])
def test_versions_that_do(torch: str, xla: str) -> None:
    """The third version number and a build's name change no interface."""
    assert find_version_problem({"torch": torch, "torch_xla": xla}.get) == ""
