"""Every ready config, the tutorial's two configs, and every way to start a script, each as a complete run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "train_tiny.py"
CONFIGS = Path(__file__).parents[2] / "ds_configs"
# C++ ops are built once for all tests; the launch fixtures give each test an empty home.
CACHE = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# "The two configs from a well-known tutorial", as printed there.
TUTORIAL_STAGE_2: dict[str, Any] = {
    "fp16": {
        "enabled": "true",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 15,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
TUTORIAL_STAGE_3: dict[str, Any] = {
    "fp16": TUTORIAL_STAGE_2["fp16"],
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": TUTORIAL_STAGE_2["scheduler"],
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def on_a_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """Replace fp16 by bf16, since DeepSpeed has no fp16 on a CPU."""
    return {"bf16": {"enabled": "true"}, **{key: value for key, value in config.items() if key != "fp16"}}


@pytest.fixture
def train(
    tmp_path: Path,
    environment: dict[str, str],
    run_launcher: Callable[..., Any],
    forked_workers: dict[str, str],
    built_ops: None,
) -> Callable[..., dict[str, Any]]:
    """Run a command to its end and return the script's output. Workers of `zero-plugin launch` are forks."""

    def train(*command: str) -> dict[str, Any]:
        variables = {**environment, "XDG_CACHE_HOME": CACHE, **forked_workers}
        done = run_launcher(command, seconds=280, cwd=tmp_path, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        report: dict[str, Any] = json.loads(line)
        return report

    return train


LAUNCH = (sys.executable, "-m", "zero_plugin", "launch")
STAGES = {
    "zero1": 1,
    "zero2": 2,
    "zero2_placeholders": 2,
    "zero2_offload": 2,
    "zero3": 3,
    "zero3_offload": 3,
    "zero3_nvme": 3,
}


def ready_configs() -> Iterator[Any]:
    """List each config's name and kind. A JSON equals its YAML, and the stages differ little in their launch.

    The README's first loop, below, trains with zero2.yaml.
    """
    daily = {("zero2_placeholders", "yaml"), ("zero2_offload", "yaml"), ("zero3", "yaml")}
    for name in STAGES:
        for kind in ("yaml", "json"):
            yield pytest.param(name, kind, marks=[] if (name, kind) in daily else pytest.mark.campaign)


def device_of(zero: dict[str, Any], section: str) -> str:
    """Return the device that a section of the resolved configuration chooses."""
    return str((zero.get(section) or {}).get("device") or "none")


@pytest.mark.processes
@pytest.mark.parametrize(("name", "kind"), list(ready_configs()))
def test_ready_zero_config_trains(name: str, kind: str, train: Callable[..., dict[str, Any]]) -> None:
    """`zero-plugin launch --config_file ds_configs/…` trains two processes at the stage and offload of its name.

    The script has placeholders. Without a section they are AdamW and a linear warm-up and decay.
    """
    report = train(*LAUNCH, "--config_file", str(CONFIGS / f"{name}.{kind}"), "--num_processes", "2", str(SCRIPT))
    assert report["processes"] == 2
    assert report["model"] == "DeepSpeedEngine"
    zero = report["config"]["zero_optimization"]
    assert zero["stage"] == STAGES[name]
    offload = {"offload": "cpu", "nvme": "nvme"}.get(name.partition("_")[2], "none")
    assert device_of(zero, "offload_optimizer") == offload
    assert device_of(zero, "offload_param") == (offload if STAGES[name] == 3 else "none")
    assert report["optimizer"] == ("AdamW" if offload == "none" else "DeepSpeedCPUAdam")
    assert report["lr"] == [0.0]  # at the end of the decay
    assert report["precision"] == ("bf16" if kind == "yaml" else "no")
    assert report["losses"][-1] < report["losses"][0]
    assert "auto" not in json.dumps(report["config"]).replace('"keep_in_fp32_modules": "auto"', "")


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp", "cpu"])
def test_ready_plain_config_trains(name: str, train: Callable[..., dict[str, Any]]) -> None:
    """The configs without ZeRO train the same script."""
    report = train(*LAUNCH, "--config_file", str(CONFIGS / f"{name}.yaml"), str(SCRIPT))
    assert report["model"] == "DistributedDataParallel"
    assert report["optimizer"] == "AdamW"
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        pytest.param(TUTORIAL_STAGE_2, "AdamW", id="2", marks=pytest.mark.campaign),
        pytest.param(TUTORIAL_STAGE_3, "DeepSpeedCPUAdam", id="3"),
    ],
)
def test_tutorial_config_trains(
    config: dict[str, Any], optimizer: str, train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A widely copied config runs as printed (with bf16 for fp16). The loop fills every auto."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(on_a_cpu(config), indent=2))
    report = train(*LAUNCH, "--config_file", str(file), "--num_processes", "2", str(SCRIPT))
    resolved = report["config"]
    assert report["precision"] == "bf16"
    assert report["optimizer"] == optimizer
    assert resolved["train_batch_size"] == 8
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["gradient_clipping"] == 0.0
    assert resolved["zero_optimization"]["stage"] == config["zero_optimization"]["stage"]
    zero = resolved["zero_optimization"]
    assert zero["overlap_comm"] is True
    assert "auto" not in json.dumps(resolved).replace('"keep_in_fp32_modules": "auto"', "")
    arguments = resolved["optimizer"]["params"]
    assert (arguments["lr"], arguments["weight_decay"], tuple(arguments["betas"])) == (1e-2, 0.1, (0.9, 0.95))
    assert report["lr"] == [0.0]  # at the end of WarmupDecayLR, whose total comes from the placeholder
    if zero["stage"] == 2:
        assert arguments["torch_adam"] is True
    else:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
        for section in ("offload_optimizer", "offload_param"):
            assert (device_of(zero, section), zero[section]["pin_memory"]) == ("cpu", True)
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize("config", [TUTORIAL_STAGE_2, TUTORIAL_STAGE_3], ids=["2", "3"])
def test_tutorial_config_with_fp16_says_so_on_a_cpu(
    config: dict[str, Any], launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The printed config with fp16 is understood. On a CPU it is refused with what to write."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config, indent=2))
    done = launch("--config_file", str(file), "--num_processes", "1", str(SCRIPT))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "DeepSpeed does not run fp16 on a cpu device" in done.stderr
    assert "Write bf16" in done.stderr


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(1200)  # five launches
def test_every_way_to_start_gives_the_same_losses(
    train: Callable[..., dict[str, Any]], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """launch, torchrun, torch.distributed.launch and plain python run the script, with the config named in code."""
    config = str(tmp_path / "zero2.yaml")
    Path(config).write_text("scheduler_counts: steps\ndeepspeed_config: {zero_stage: 2}\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    runs = [
        train(*LAUNCH, "--config_file", config, "--num_processes", "2", str(SCRIPT)),
        train(*torchrun, str(SCRIPT), config),
        train(
            sys.executable,
            "-m",
            "torch.distributed.launch",
            "--use_env",
            "--nproc_per_node=1",
            f"--master_port={free_port()}",
            str(SCRIPT),
            config,
        ),
        train(sys.executable, str(SCRIPT), config),
        train(*LAUNCH, "--config_file", config, "--num_processes", "1", "--zero_stage", "3", str(SCRIPT)),
    ]
    assert [run["processes"] for run in runs] == [2, 2, 1, 1, 1]
    assert {run["model"] for run in runs} == {"DeepSpeedEngine"}
    for run in runs[1:]:
        assert run["losses"] == pytest.approx(runs[0]["losses"], abs=1e-5)


@pytest.mark.processes
def test_ready_auto_config_trains(train: Callable[..., dict[str, Any]]) -> None:
    """`ds_configs/auto.yaml` launches unchanged: with enough memory, the plan offloads nothing."""
    flags = ("--config_file", str(CONFIGS / "auto.yaml"), "--num_processes", "2", "--gpu_memory", "8GiB")
    report = train(*LAUNCH, *flags, "--host_memory", "16GiB", str(SCRIPT))
    zero = report["config"]["zero_optimization"]
    assert zero["stage"] in (1, 2)
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == ("none", "none")
    assert "auto" not in json.dumps(zero)
    assert report["losses"][-1] < report["losses"][0]


AFTER_THE_LOOP = """
import json
with torch.no_grad():
    x = inputs.to(accelerator.device)
    targets = x[:, :4].sin()
    losses = [targets.square().mean().item(), loss_function(model(x).float(), targets).item()]
report = {"model": type(model).__name__, "optimizer": type(optimizer.optimizer).__name__, "losses": losses}
accelerator.print(json.dumps({**report, "lr": scheduler.get_last_lr(), "steps": len(loader)}))
"""


@pytest.mark.processes
def test_readmes_first_loop_trains_with_its_first_command(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The README's first script, launched by its first command, trains to the end of its schedule."""
    readme = (CONFIGS.parent / "README.md").read_text(encoding="utf-8")
    loop = readme.partition("```python\n")[2].partition("```")[0]
    command = next(line for line in readme.splitlines() if line.startswith("zero-plugin launch")).split()
    (tmp_path / command[-1]).write_text(loop + AFTER_THE_LOOP)
    report = train(*LAUNCH, *command[2:])
    assert (report["model"], report["optimizer"], report["steps"]) == ("DeepSpeedEngine", "AdamW", 16)
    assert report["losses"][-1] < 0.5 * report["losses"][0]
    assert report["lr"] == pytest.approx([1e-3])  # the end of the schedule, with the epoch's last step
