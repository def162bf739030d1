"""From a document, a program and a machine to the complete spec."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, from_environment
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import shell_script, worker_command
from zero_plugin.launch.spec import LOOPBACK, LaunchSpec, Program
from zero_plugin.machine.hardware import Machine

LAPTOP = Machine(gpus=0, cores=8)
SERVER = Machine(gpus=4, cores=64)
SCRIPT = Program(__file__, ("--lr", "1"))
TWO_MACHINES = {"num_machines": 2, "num_processes": 8, "main_process_ip": "10.0.0.1", "machine_rank": 1}


def document(**keys: Any) -> Document:
    said = {(key,): (f"c.yaml:{n}:1", value) for n, (key, value) in enumerate(keys.items(), 1)}
    return Document().overlay("file", said)


def build(machine: Machine, environ: dict[str, str] | None = None, **keys: Any) -> LaunchSpec:
    return build_spec(document(**keys), SCRIPT, machine, environ or {})


@pytest.mark.parametrize(
    ("machine", "keys", "processes"),
    [
        (LAPTOP, {}, 1),
        (LAPTOP, {"num_processes": 3}, 3),
        (LAPTOP, {"distributed_type": "DEEPSPEED", "num_processes": 2}, 2),
        (SERVER, {}, 4),
        (SERVER, {"gpu_ids": "0,2"}, 2),
        (SERVER, {"distributed_type": "NO"}, 1),
        (SERVER, {"use_cpu": True}, 1),
        (SERVER, {"distributed_type": "MULTI_CPU", "num_processes": 6}, 6),
        (SERVER, TWO_MACHINES, 4),
    ],
    ids=str,
)
def test_number_of_processes(machine: Machine, keys: dict[str, Any], processes: int) -> None:
    """The typed number is divided by the machines. The default is one per usable GPU, or one."""
    spec = build(machine, **keys)
    assert spec.local_processes == processes
    assert bool(spec.local_processes_reason) == ("num_processes" not in keys or "num_machines" in keys)


def test_the_workers_get_the_document() -> None:
    """One variable holds the document and the number of workers, even if the user wrote none."""
    spec = build(LAPTOP, mixed_precision="bf16", num_processes=2)
    assert from_environment({ENVIRONMENT_VARIABLE: spec.environment[ENVIRONMENT_VARIABLE].value}) == spec.document
    spec = build(LAPTOP, mixed_precision="bf16")
    handed = from_environment({ENVIRONMENT_VARIABLE: spec.environment[ENVIRONMENT_VARIABLE].value})
    assert handed is not None
    assert handed.launch.value("num_processes") == spec.local_processes == 1


@pytest.mark.parametrize(
    ("machine", "environ", "keys", "expected"),
    [
        (LAPTOP, {}, {"num_processes": 2}, {"OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu"}),
        (LAPTOP, {}, {"num_processes": 99}, {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}),
        (LAPTOP, {"OMP_NUM_THREADS": "3", "DS_ACCELERATOR": "cpu"}, {"num_processes": 2}, {}),
        (
            LAPTOP,
            {"OMP_NUM_THREADS": "3", "DS_ACCELERATOR": ""},
            {"num_cpu_threads_per_process": 5},
            {"OMP_NUM_THREADS": "5"},
        ),
        (SERVER, {}, {}, {"OMP_NUM_THREADS": "16"}),
        (SERVER, {}, {"gpu_ids": "0,2"}, {"OMP_NUM_THREADS": "32", "CUDA_VISIBLE_DEVICES": "0,2"}),
        (
            SERVER,
            {"CUDA_VISIBLE_DEVICES": "4,GPU-1f, 6,7"},
            {"gpu_ids": "2,1"},
            {"OMP_NUM_THREADS": "32", "CUDA_VISIBLE_DEVICES": "6,GPU-1f"},
        ),
        (SERVER, {}, {"use_cpu": True}, {"OMP_NUM_THREADS": "64", "DS_ACCELERATOR": "cpu"}),
        (SERVER, {}, {"use_cpu": True, "gpu_ids": "9"}, {"OMP_NUM_THREADS": "64", "DS_ACCELERATOR": "cpu"}),
    ],
    ids=str,
)
def test_environment(machine: Machine, environ: dict[str, str], keys: dict[str, Any], expected: dict[str, str]) -> None:
    """Threads come from cores and processes, DeepSpeed gets a CPU run's setting, and the user's variables stay.

    On one machine gloo and, on GPUs, NCCL must use loopback.

    `gpu_ids` selects among the GPUs that this process can see.
    """
    added = build(machine, environ, **keys).environment
    ours = {name: setting.value for name, setting in added.items() if not name.startswith("ACCELERATE_")}
    network = {"GLOO_SOCKET_IFNAME": "lo"} | (
        {} if "DS_ACCELERATOR" in {**environ, **expected} else {"NCCL_SOCKET_IFNAME": "=lo"}
    )
    assert ours == {**network, **expected, ENVIRONMENT_VARIABLE: added[ENVIRONMENT_VARIABLE].value}
    assert all(setting.reason for setting in added.values())


def test_one_machine_meets_on_a_free_port() -> None:
    """It uses port 0, so its store chooses the port, and its own run id. Two launches never meet."""
    one, other = build(LAPTOP).rendezvous, build(LAPTOP).rendezvous
    assert (one.backend, one.endpoint, one.local_address) == (LOOPBACK, "127.0.0.1:0", None)
    assert one.run_id != other.run_id


def test_several_machines_meet_at_the_first() -> None:
    """The static rendezvous is at machine 0, port 29500 by default. An endpoint and options are passed on."""
    meeting = build(SERVER, **TWO_MACHINES).rendezvous
    assert (meeting.backend, meeting.endpoint, meeting.options) == ("static", "10.0.0.1:29500", {"rank": 1})
    keys = {**TWO_MACHINES, "rdzv_backend": "c10d", "rdzv_conf": "timeout=5, read_timeout = 7,"}
    meeting = build_spec(document(**keys), SCRIPT, SERVER, {}, rendezvous_endpoint="10.0.0.9:99").rendezvous
    assert (meeting.backend, meeting.endpoint) == ("c10d", "10.0.0.9:99")
    assert meeting.options == {"timeout": "5", "read_timeout": "7"}


def test_the_network_that_leads_to_machine_0() -> None:
    """gloo and, on GPUs, NCCL get the interface by which this machine reaches machine 0. The user's own names stay."""
    keys = {**TWO_MACHINES, "main_process_ip": "127.0.0.1", "main_process_port": 29512}
    added = build(SERVER, **keys).environment
    assert (added["GLOO_SOCKET_IFNAME"].value, added["NCCL_SOCKET_IFNAME"].value) == ("lo", "=lo")
    assert "interface through which this machine reaches 127.0.0.1" in added["GLOO_SOCKET_IFNAME"].reason
    assert "NCCL_SOCKET_IFNAME" not in build(LAPTOP, **keys).environment
    typed = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth8"}
    assert not set(typed) & set(build(SERVER, typed, **keys).environment)
    assert not set(typed) & set(build(SERVER, typed).environment)
    assert "on this machine only" in build(SERVER).environment["NCCL_SOCKET_IFNAME"].reason
    assert build(SERVER, **{**keys, "rdzv_backend": "c10d"}).rendezvous.local_address == "127.0.0.1"


def test_machine_0_must_have_its_port() -> None:
    """Machine 0 finds this before the start. The others cannot know."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        keys = {**TWO_MACHINES, "main_process_port": server.getsockname()[1]}
        with pytest.raises(ConfigError, match=r"is taken on this machine, which is machine 0"):
            build(SERVER, **{**keys, "machine_rank": 0})
        assert build(SERVER, **keys).machines == 2


def test_cores_are_told_and_handed_to_the_workers() -> None:
    """`enable_cpu_affinity` logs its findings, and each rank's cores are in the workers' command."""
    spec = build(LAPTOP, enable_cpu_affinity=True, num_processes=2)
    assert spec.cores_reason
    assert build(LAPTOP).cores_reason == ""
    bound = replace(spec, cores=(frozenset({0, 1, 8}), frozenset({2, 3})), cores_reason="because")
    command = worker_command(bound)
    assert command[3:5] == ["--cores", "0-1,8/2-3"]
    assert "# cores of each process: 0-1,8 / 2-3 (because)" in shell_script(bound)


@pytest.mark.parametrize(
    ("machine", "keys", "parts"),
    [
        (SERVER, {"num_processes": 5}, ["c.yaml:1:1: num_processes", "4 usable GPUs"]),
        (SERVER, {"num_processes": 3, "gpu_ids": "0,2"}, ["num_processes", "2 usable GPUs"]),
        (LAPTOP, {"num_processes": 10**20}, ["num_processes", "Write at most 1024"]),
        (SERVER, {"num_machines": 2}, ["Give --main_process_ip", "Give --machine_rank"]),
        (SERVER, {**TWO_MACHINES, "machine_rank": "auto"}, ["machine_rank", "0 to 1"]),
        (SERVER, {**TWO_MACHINES, "main_process_port": 0}, ["main_process_port"]),
        (SERVER, {**TWO_MACHINES, "deepspeed_multinode_launcher": "pdsh"}, ["pdsh", "standard"]),
        (SERVER, {"gpu_ids": "0,4"}, ["c.yaml:1:1: gpu_ids: 4: no GPU", "Write all, or some of 0,1,2,3"]),
        (SERVER, {"gpu_ids": "0,one,-1"}, ["gpu_ids: one,-1: no GPU"]),
        (SERVER, {"gpu_ids": [1, 1]}, ["gpu_ids: 1,1 names a GPU twice"]),
        (LAPTOP, {"gpu_ids": "0"}, ["gpu_ids: there is no GPU here"]),
        (LAPTOP, {"log_dir": __file__}, ["c.yaml:1:1: log_dir", "is no folder"]),
    ],
    ids=str,
)
def test_what_this_machine_cannot_launch(machine: Machine, keys: dict[str, Any], parts: list[str]) -> None:
    """The error comes before any process starts and names the key, its place, and what to write."""
    with pytest.raises(ConfigError) as caught:
        build(machine, **keys)
    for part in parts:
        assert part in str(caught.value)


def test_a_zero_section_alone_is_looked_at_as_zero() -> None:
    """Without a `distributed_type` a ZeRO section runs on DeepSpeed, so DeepSpeed's limits are checked here too."""
    with_zero = document(mixed_precision="fp16").overlay(
        "file", {("deepspeed", "zero_optimization", "stage"): ("c.yaml:2:1", 2)}
    )
    with pytest.raises(ConfigError, match="DeepSpeed does not run fp16 on a cpu"):
        build_spec(with_zero, SCRIPT, LAPTOP, {})


def test_groups_that_share_samples_divide_the_processes() -> None:
    """Processes that cannot be divided are refused before the start, like in `explain` and the run."""
    shared = Document().overlay("file", {("deepspeed", "sequence_parallel_size"): ("ds.json:2:3", 4)})
    assert build_spec(shared, SCRIPT, SERVER, {}).local_processes == 4
    with pytest.raises(ConfigError, match=r"ds\.json:2:3: sequence_parallel_size: 4 does not divide the 1 processes"):
        build_spec(shared, SCRIPT, LAPTOP, {})


def test_a_flag_for_gpus_without_a_gpu() -> None:
    """`--multi_gpu` is refused without a GPU. A file with this value may move there and runs on the CPU."""
    typed = Document().overlay("flag", {("distributed_type",): ("--multi_gpu", "MULTI_GPU")})
    with pytest.raises(ConfigError, match=r"--multi_gpu: .*no GPU here.*\n.*--cpu"):
        build_spec(typed, SCRIPT, LAPTOP, {})
    assert build_spec(typed, SCRIPT, SERVER, {}).local_processes == 4
    assert build(LAPTOP, distributed_type="MULTI_GPU").environment["DS_ACCELERATOR"].value == "cpu"


def test_an_nvme_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The error comes before any process starts. Without ZeRO the path is unused and may be anything."""
    (tmp_path / "file").touch()

    def offloading(path: Path, **launch: Any) -> Document:
        section = ("deepspeed", "zero_optimization")
        values = {
            (*section, "stage"): 3,
            (*section, "offload_param", "device"): "nvme",
            (*section, "offload_param", "nvme_path"): str(path),
        }
        said = {path: ("--offload_param_nvme_path", value) for path, value in values.items()}
        return document(**launch).overlay("flag", said)

    with pytest.raises(ConfigError, match=r"--offload_param_nvme_path: .*file is no folder that can be written"):
        build_spec(offloading(tmp_path / "file" / "swap"), SCRIPT, LAPTOP, {})
    build_spec(offloading(tmp_path / "new" / "swap"), SCRIPT, LAPTOP, {})
    build_spec(offloading(tmp_path / "file" / "swap", distributed_type="MULTI_CPU"), SCRIPT, LAPTOP, {})
    assert not (tmp_path / "new").exists()


def test_a_rendezvous_for_one_machine_is_refused() -> None:
    """An endpoint at which no machine would meet is not dropped silently."""
    with pytest.raises(ConfigError, match="--rdzv_endpoint: has no effect"):
        build_spec(Document(), SCRIPT, LAPTOP, {}, rendezvous_endpoint="10.0.0.9:99")


def test_a_taken_port_is_found_before_the_start() -> None:
    """A port that another server holds is an error, not a hang."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            build(LAPTOP, main_process_port=port)
    assert build(LAPTOP, main_process_port=port).rendezvous.endpoint == f"127.0.0.1:{port}"


@pytest.mark.parametrize("program", [Program("gone.py"), Program("."), Program("no-such-tool", kind="executable")])
def test_a_program_that_is_not_there(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing script, or an executable that is not found, is a command line error."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{program.name} is not"):
        build_spec(Document(), program, LAPTOP, {})


def test_a_script_of_nearly_that_name_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a mistyped script name suggests the right file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=r"Did you mean train\.py"):
        build_spec(Document(), Program("trian.py"), LAPTOP, {})
