"""Settings for scripts built on Accelerate or transformers' Trainer, which run unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.read import document_from_mapping
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import overridden
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.machine.hardware import Machine

pytestmark = pytest.mark.programs

FOLDER = Path(__file__).parent
LAUNCH = (sys.executable, "-m", "zero_plugin", "launch")
LAPTOP, SERVER = Machine(gpus=0, cores=8), Machine(gpus=4, cores=64)
# C++ ops are built once for all tests; the launch fixtures give each test an empty home.
CACHE = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))


def build(keys: dict[str, Any], machine: Machine = LAPTOP, environ: dict[str, str] | None = None) -> LaunchSpec:
    return build_spec(document_from_mapping(keys, "code"), Program(__file__), machine, environ or {})


def told(spec: LaunchSpec) -> dict[str, str]:
    return {name: set_.value for name, set_ in spec.environment.items() if name.startswith("ACCELERATE_")}


@pytest.mark.parametrize(
    ("keys", "machine", "expected"),
    [
        ({"num_processes": 2}, SERVER, {}),
        ({"num_processes": 2}, LAPTOP, {"USE_CPU": "true"}),
        (
            {"distributed_type": "MULTI_CPU", "mixed_precision": "no"},
            SERVER,
            {"USE_CPU": "true", "MIXED_PRECISION": "no"},
        ),
        ({"distributed_type": "NO", "debug": True}, SERVER, {"DEBUG_MODE": "true"}),
        (
            {"num_processes": 2, "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": False}},
            SERVER,
            {"DYNAMO_BACKEND": "inductor", "DYNAMO_USE_DYNAMIC": "false"},
        ),
        (
            {"distributed_type": "MULTI_GPU", "deepspeed_config": {"gradient_accumulation_steps": 4}},
            SERVER,
            {"GRADIENT_ACCUMULATION_STEPS": "4"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 2}},
            LAPTOP,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2", "MIXED_PRECISION": "bf16"},
        ),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto"},
            LAPTOP,
            {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "1", "MIXED_PRECISION": "bf16"},
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 3,
                    "gradient_clipping": 0.5,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "nvme",
                    "offload_param_nvme_path": "nvme",
                    "zero3_init_flag": False,
                    "zero3_save_16bit_model": True,
                    "deepspeed_moe_layer_cls_names": "One, Other",
                },
            },
            LAPTOP,
            {
                "USE_DEEPSPEED": "true",
                "DEEPSPEED_ZERO_STAGE": "3",
                "GRADIENT_CLIPPING": "0.5",
                "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
                "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "nvme",
                "DEEPSPEED_ZERO3_INIT": "false",
                "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
                "DEEPSPEED_MOE_LAYER_CLS_NAMES": "One,Other",
            },
        ),
    ],
    ids=str,
)
def test_variables_say_what_the_configuration_says(
    keys: dict[str, Any], machine: Machine, expected: dict[str, str]
) -> None:
    """Each of Accelerate's variables has a reason. Settings that the configuration leaves to the script have none."""
    spec = build(keys, machine)
    assert told(spec) == {f"ACCELERATE_{name}": value for name, value in expected.items()}
    assert all(setting.reason for setting in spec.environment.values())
    assert (spec.deepspeed_config is not None) == ("USE_DEEPSPEED" in expected)


def test_shared_samples_are_accelerates_own() -> None:
    """Its variables have them, but the engine's file does not: DeepSpeed would make its own groups of that."""
    keys = {"zero_stage": 2, "sequence_parallel_size": 2}
    spec = build({"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": keys})
    assert told(spec)["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert spec.environment["PARALLELISM_CONFIG_SP_SIZE"].value == "2"
    assert spec.deepspeed_config is not None
    assert "sequence_parallel_size" not in spec.deepspeed_config
    assert "PARALLELISM_CONFIG_SP_SIZE" not in build({"num_processes": 2}, SERVER).environment


def test_zero_on_the_cpu_of_a_machine_with_gpus_hides_them() -> None:
    """`ACCELERATE_USE_CPU` would make Accelerate drop ZeRO. Without it Accelerate uses a GPU that it sees."""
    spec = build({"distributed_type": "DEEPSPEED", "use_cpu": True}, SERVER)
    assert spec.environment["CUDA_VISIBLE_DEVICES"].value == ""
    assert "ACCELERATE_USE_CPU" not in spec.environment


def test_the_configuration_wins_over_the_environment_and_says_so() -> None:
    """Variables of an earlier launch or a shell are overridden only where they differ."""
    environ = {
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_CPU": "0",
        "ACCELERATE_USE_DEEPSPEED": "True",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        "ACCELERATE_LOG_LEVEL": "INFO",
    }
    spec = build({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, SERVER, environ)
    assert told(spec) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "false",
        "ACCELERATE_USE_DEEPSPEED": "false",
    }
    said = overridden(spec.environment, environ)
    assert len(said) == 3
    assert said[0] == "Overriding ACCELERATE_MIXED_PRECISION=fp16 from your environment with bf16: code"
    assert overridden(build({"mixed_precision": "bf16"}, SERVER).environment, environ | told(spec)) == []


def test_what_has_no_effect_is_logged_by_the_launcher(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A script of another layer does not log it, and one of this package does not log it again."""
    (tmp_path / "c.yaml").write_text("distributed_type: 'NO'\nnum_machines: 1\nrdzv_conf: timeout=60\n")
    (tmp_path / "show.py").write_text(
        "import os\n"
        "from zero_plugin.config.document import from_environment\n"
        "from zero_plugin import Accelerator\n"
        "print('handed over:', from_environment(os.environ).notes)\n"
        "Accelerator(gradient_accumulation_steps=2)\n"
    )
    done = launch("--config_file", "c.yaml", "--cpu", "--num_processes", "1", "show.py")
    assert "handed over: ()" in done.stdout
    said = 'c.yaml:3:1: rdzv_conf = "timeout=60": has no effect: num_machines is 1 at c.yaml:2:1'
    assert (done.stderr.count(said), done.stderr.count(f"warning: {said}")) == (1, 1)


def test_dry_run_shows_variables_and_configuration(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A shell that runs the output sets the variables and writes the JSON that one of them names."""
    (tmp_path / "show.py").write_text(
        "import json, os\n"
        "config = json.load(open(os.environ['ACCELERATE_DEEPSPEED_CONFIG_FILE']))\n"
        "print(os.environ['ACCELERATE_MIXED_PRECISION'], config['zero_optimization']['stage'])\n"
    )
    shown = launch("--zero_stage", "2", "--mixed_precision", "bf16", "--dry_run", "show.py")
    assert "export ACCELERATE_DEEPSPEED_ZERO_STAGE=2" in shown.stdout
    python = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", shown.stdout],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.strip() == "bf16 2", done.stderr


@pytest.fixture
def train(
    tmp_path: Path,
    environment: dict[str, str],
    run_launcher: Callable[..., Any],
    built_ops: None,
) -> Callable[..., dict[str, Any]]:
    """Launch a script of this folder to its end and return its output. Check that no process is left."""

    def train(script: str, *flags: str, forks: dict[str, str], arguments: tuple[str, ...] = ()) -> dict[str, Any]:
        command = (*LAUNCH, *flags, str(FOLDER / script), *arguments)
        with_cache = {**environment, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": CACHE, **forks}
        done = run_launcher(command, seconds=200, cwd=tmp_path, env=with_cache)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not list(tmp_path.glob("zero_plugin_*"))
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"'))
        report: dict[str, Any] = json.loads(line)
        return report

    return train


@pytest.mark.campaign  # every day tests/foreign launches a Trainer at ZeRO-2
@pytest.mark.processes
@pytest.mark.timeout(1200)  # three launches
def test_a_trainer_script_runs_unchanged(
    train: Callable[..., dict[str, Any]], tmp_path: Path, forked_alone: dict[str, str]
) -> None:
    """transformers' Trainer at ZeRO-2 and on DDP: two processes each, the same losses, its arguments filled in.

    The processes are not forks. The script leaves the process group to the interpreter's end, where a fork may hang.
    """
    config = tmp_path / "zero2.json"
    config.write_text(
        json.dumps({"gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    )
    numbers = ("max_grad_norm=0.5", "gradient_accumulation_steps=1")
    given: dict[str, Any] = {"arguments": numbers, "forks": forked_alone}
    ddp = train("train_trainer.py", "--cpu", "--num_processes", "2", **given)
    zero = train("train_trainer.py", "--config_file", str(config), "--num_processes", "2", **given)
    assert (ddp["kind"], ddp["processes"], ddp["config"]) == ("MULTI_CPU", 2, None)
    assert (zero["kind"], zero["processes"], zero["wrapped"]) == ("DEEPSPEED", 2, "DeepSpeedEngine")
    assert zero["config"]["train_micro_batch_size_per_gpu"] == 4
    assert zero["config"]["gradient_clipping"] == 0.5
    assert zero["config"]["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert len(zero["losses"]) == 6
    assert zero["losses"][-1] < zero["losses"][0]
    assert zero["losses"] == pytest.approx(ddp["losses"], abs=2e-3)  # the Trainer rounds them


@pytest.mark.processes
@pytest.mark.timeout(1200)  # three launches
def test_an_accelerate_script_runs_unchanged(
    train: Callable[..., dict[str, Any]], forked_workers: dict[str, str]
) -> None:
    """Accelerate itself trains alike with ZeRO on one process, ZeRO on two that name gloo, and DDP."""
    script, flags = "train_accelerate.py", ("--gradient_accumulation_steps", "1", "--gradient_clipping", "0")
    forks = forked_workers
    one = train(script, "--zero_stage", "2", *flags, "--num_processes", "1", forks=forks)
    two = train(script, "--zero_stage", "3", *flags, "--num_processes", "2", arguments=("gloo",), forks=forks)
    ddp = train(script, "--cpu", "--num_processes", "2", "--gradient_accumulation_steps", "1", forks=forks)
    assert [run["kind"] for run in (one, two, ddp)] == ["DEEPSPEED", "DEEPSPEED", "MULTI_CPU"]
    assert [run["processes"] for run in (one, two, ddp)] == [1, 2, 2]
    assert two["config"]["zero_optimization"]["stage"] == 3
    assert two["config"]["train_batch_size"] == 8
    for run in (two, ddp):
        assert run["losses"] == pytest.approx(one["losses"], abs=1e-4)


def test_accelerate_is_given_the_nvme_paths(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Accelerate's own launcher loses them. Here its plugin has them, by file and by variable."""
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 1\n"
        "deepspeed_config: {zero_stage: 3, offload_optimizer_device: nvme, offload_optimizer_nvme_path: swap}\n"
    )
    (tmp_path / "show.py").write_text(
        "import json, os\nfrom accelerate.utils import DeepSpeedPlugin\n"
        "plugin = DeepSpeedPlugin()\n"
        "file = os.environ.pop('ACCELERATE_DEEPSPEED_CONFIG_FILE')\n"
        "again = DeepSpeedPlugin()\n"
        "print(json.dumps([p.deepspeed_config['zero_optimization']['offload_optimizer'] for p in (plugin, again)]))\n"
        "print(file)\n"
    )
    done = launch("--config_file", "a.yaml", "show.py")
    assert done.returncode == 0, done.stderr
    by_file, by_variable = json.loads(done.stdout.splitlines()[-2])
    assert by_file == {"device": "nvme", "nvme_path": "swap", "pin_memory": False}
    assert by_variable == {"device": "nvme", "nvme_path": "swap"}
    assert not Path(done.stdout.splitlines()[-1]).exists()
