"""Hostfile launches: the exact commands of DeepSpeed's launcher, the data sent with them, and early refusals."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, from_environment
from zero_plugin.errors import ConfigError
from zero_plugin.launch import remote_worker
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.remote_worker import WorkerConfig, choose_variables, decode_config, encode_config
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.machine.hardware import Machine

LAPTOP = Machine(gpus=0, cores=8)
SCRIPT = Program(__file__, ("--lr", "1", "a b", "ü;$x"))
RUNNER = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "{hostfile}"]
BY_SSH = ["--force_multi", "--no_ssh_check", "--no_local_rank"]


@pytest.fixture(autouse=True)
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "uneven").write_text("a slots=2\nb slots=1\n")
    return tmp_path / "hosts"


def document(**keys: Any) -> Document:
    said = {(key,): (f"c.yaml:{n}:1", value) for n, (key, value) in enumerate(keys.items(), 1)}
    return Document().overlay("file", said)


def build(environ: dict[str, str] | None = None, **keys: Any) -> LaunchSpec:
    asked = {"deepspeed_hostfile": "hosts", "distributed_type": "DEEPSPEED", **keys}
    return build_spec(document(**asked), SCRIPT, LAPTOP, environ or {})


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, ["--launcher", "pdsh", *BY_SSH, "--master_port", "29500"]),
        (
            {"main_process_ip": "10.0.0.1", "main_process_port": 1234, "num_processes": 4, "num_machines": 2},
            ["--launcher", "pdsh", *BY_SSH, "--master_addr", "10.0.0.1", "--master_port", "1234"],
        ),
        ({"num_processes": 2}, ["--launcher", "pdsh", *BY_SSH, "--num_gpus", "1", "--master_port", "29500"]),
        (
            {"deepspeed_inclusion_filter": "a@b:1"},
            ["--launcher", "pdsh", *BY_SSH, "--include", "a@b:1", "--master_port", "29500"],
        ),
        (
            {"deepspeed_exclusion_filter": "b", "num_machines": 1},
            ["--launcher", "pdsh", *BY_SSH, "--exclude", "b", "--master_port", "29500"],
        ),
        (
            {"deepspeed_multinode_launcher": "openmpi"},
            ["--launcher", "openmpi", *BY_SSH, "--master_addr", "a", "--master_port", "29500"],
        ),
        (
            {"deepspeed_multinode_launcher": "slurm", "deepspeed_inclusion_filter": "a"},
            ["--launcher", "slurm", *BY_SSH, "--include", "a", "--master_addr", "a", "--master_port", "29500"],
        ),
        (
            {"deepspeed_multinode_launcher": "nossh", "machine_rank": 1},
            ["--no_ssh", "--node_rank", "1", "--no_local_rank", "--master_addr", "a", "--master_port", "29500"],
        ),
        (
            {"deepspeed_multinode_launcher": "mvapich"},
            ["--launcher", "mvapich", *BY_SSH, "--master_addr", "a", "--master_port", "29500"],
        ),
    ],
    ids=str,
)
def test_exact_commands(keys: dict[str, Any], options: list[str], hostfile: Path) -> None:
    """DeepSpeed's launcher gets the hostfile's full path and, after its options, one file, a mark and one word."""
    hosts = build(**keys).hosts
    assert hosts is not None
    runner = [part.format(hostfile=hostfile) for part in RUNNER]
    assert list(hosts.command[:-3]) == [*runner, *options, "--log_level", "error"]
    assert hosts.command[-3:-1] == (remote_worker.__file__, hosts.run)
    assert re.fullmatch(r"zero_plugin_[0-9a-f]{32}", hosts.run)


def test_the_word_holds_folder_program_and_environment(hostfile: Path) -> None:
    """Spaces, other alphabets and shell characters survive any number of shells. The document arrives complete."""
    spec = build({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "HOME": "/root"}, use_cpu=True)
    assert spec.hosts is not None
    word = spec.hosts.command[-1]
    assert re.fullmatch(r"[\w=-]+", word, re.ASCII)
    config = decode_config(word)
    assert config.folder == str(hostfile.parent)
    assert list(config.arguments) == [__file__, "--lr", "1", "a b", "ü;$x"]
    handed = from_environment(config.environment)
    assert handed is not None
    assert handed.launch.value("num_processes") == 4
    assert handed.launch.without("num_processes") == spec.document.launch
    assert handed.deepspeed == spec.document.deepspeed
    assert config.environment["NCCL_DEBUG"] == "INFO"
    assert config.environment["DS_ACCELERATOR"] == "cpu"
    assert "HOME" not in config.environment
    assert "hf_secret" not in str(config)
    assert (spec.hosts.sent, spec.hosts.kept) == (("NCCL_DEBUG",), ("HF_TOKEN",))


def test_what_is_sent_gives_way_to_the_configuration() -> None:
    """As on one machine, an Accelerate variable that enables an unconfigured feature is sent disabled."""
    spec = build({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_DEBUG_MODE": "true"})
    assert spec.hosts is not None
    sent = decode_config(spec.hosts.command[-1]).environment
    assert (sent["ACCELERATE_USE_FSDP"], sent["ACCELERATE_DEBUG_MODE"]) == ("false", "true")


def test_bytes_that_are_no_text_survive() -> None:
    """A file name that is not UTF-8 arrives as it was typed."""
    config = WorkerConfig("/x", ["caf\udce9.py"], {}, None, "a", 1, False)
    assert decode_config(encode_config(config)) == config


def test_only_an_allow_list_is_sent() -> None:
    """The list has prefixes of variables that a run depends on. No name that suggests a secret is sent."""
    environ = dict.fromkeys(
        ["NCCL_IB_HCA", "OMP_NUM_THREADS", "PYTHONPATH", "WANDB_MODE", "TOKENIZERS_PARALLELISM"], "x"
    )
    secrets = dict.fromkeys(["WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_AUTH"], "x")
    others = dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "HOME", "CUDA_VISIBLE_DEVICES"], "x")
    sent, kept = choose_variables({**environ, **secrets, **others})
    assert set(sent) == set(environ)
    assert set(kept) == set(secrets)


def test_dry_run_tells_what_the_word_holds() -> None:
    """The shell lines name launcher, hosts with slots, program and variables; their last line is the command."""
    spec = build({"NCCL_DEBUG": "INFO"}, num_processes=2)
    assert spec.hosts is not None
    text = shell_script(spec)
    assert "# started by pdsh through DeepSpeed's launcher, on a (1), b (1)" in text
    assert "--lr 1 'a b'" in text
    assert f"# with {ENVIRONMENT_VARIABLE}: the configuration" in text
    assert "# environment variables copied from this shell: NCCL_DEBUG" in text
    assert text.splitlines()[-1].startswith("(cd / && ")
    assert text.splitlines()[-1].endswith(f"{spec.hosts.command[-1]})")


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"deepspeed_hostfile": "gone"}, ["gone: the hostfile cannot be read"]),
        (
            {"deepspeed_hostfile": None, "num_machines": 2, "deepspeed_multinode_launcher": "pdsh"},
            ["deepspeed_hostfile: missing for pdsh", "standard"],
        ),
        ({"num_machines": 3}, ["c.yaml:3:1: num_machines: 3, but the hostfile and its filters leave 2"]),
        ({"num_processes": 3}, ["num_processes: 3, but the hostfile", "4 slots on 2 hosts"]),
        ({"num_processes": 8}, ["num_processes: 8"]),
        ({"deepspeed_inclusion_filter": "a", "num_processes": 1}, ["num_processes: 1", "2 slots on 1 hosts"]),
        ({"deepspeed_inclusion_filter": "A9"}, ["deepspeed_inclusion_filter", "A9 is no host of the hostfile"]),
        (
            {"deepspeed_multinode_launcher": "openmpi", "deepspeed_exclusion_filter": "a"},
            ["openmpi uses all of the hostfile"],
        ),
        (
            {"deepspeed_multinode_launcher": "slurm", "deepspeed_inclusion_filter": "a@b:1"},
            ["slurm takes the slots 0 to N - 1 of each host"],
        ),
        (
            {"deepspeed_multinode_launcher": "slurm", "deepspeed_inclusion_filter": "A9"},
            ["deepspeed_inclusion_filter", "A9 is no host of the hostfile"],
        ),
        (
            {"deepspeed_multinode_launcher": "slurm", "deepspeed_hostfile": "uneven"},
            ["deepspeed_hostfile", "the hosts have different numbers of slots"],
        ),
        ({"machine_rank": 1}, ["machine_rank: 1, but pdsh starts all machines from one"]),
        ({"deepspeed_multinode_launcher": "nossh"}, ["machine_rank: missing"]),
        ({"deepspeed_multinode_launcher": "nossh", "machine_rank": 2}, ["machine_rank: 2, but there are 2 hosts"]),
        ({"max_restarts": 1, "log_dir": "logs"}, ["max_restarts", "log_dir", "it is torchrun's"]),
        ({"gpu_ids": "0"}, ["gpu_ids", "deepspeed_inclusion_filter"]),
    ],
    ids=str,
)
def test_what_is_refused_before_anything_starts(keys: dict[str, Any], parts: list[str]) -> None:
    """Mistakes in the hostfile, its filters or numbers, and options that DeepSpeed's launcher would drop, are found."""
    with pytest.raises(ConfigError) as caught:
        build(**keys)
    for part in parts:
        assert part in str(caught.value)


def test_launchers_that_are_not_tested_are_passed_on() -> None:
    """They are passed on with a log line, even those of later DeepSpeed releases.

    A near match of a known name is a typo.
    """
    for name in ("impi", "hydra"):
        (note,) = check_document(document(deepspeed_hostfile="hosts", deepspeed_multinode_launcher=name))
        assert f"{name} is untested: it is passed on to DeepSpeed's launcher" in note.headline
    spec = build(deepspeed_multinode_launcher="hydra")
    assert spec.hosts is not None
    assert "--launcher hydra" in " ".join(spec.hosts.command)
    with pytest.raises(ConfigError, match="Did you mean openmpi"):
        check_document(document(deepspeed_hostfile="hosts", deepspeed_multinode_launcher="open-mpi"))


def test_the_hostfile_counts_the_machines() -> None:
    """Without num_machines, a rank is not checked against its default of one."""
    check_document(document(deepspeed_hostfile="hosts", deepspeed_multinode_launcher="nossh", machine_rank=1))
    with pytest.raises(ConfigError, match="num_machines is 1"):
        check_document(document(machine_rank=1))


def test_one_machine_needs_no_hostfile() -> None:
    """Accelerate writes a launcher for one machine too. That launcher has no other machine to reach."""
    spec = build(deepspeed_hostfile="none", deepspeed_multinode_launcher="pdsh")
    assert spec.hosts is None
    assert build(deepspeed_multinode_launcher="standard").hosts is None
