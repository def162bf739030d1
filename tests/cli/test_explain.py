"""`zero-plugin explain`: every value and its origin, for people and programs."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from zero_plugin.plan import run_plan

ZERO3 = """\
distributed_type: DEEPSPEED
num_processes: 2
mixed_precision: bf16
deepspeed_config:
  train_micro_batch_size_per_gpu: auto
  optimizer: {type: AdamW, params: {lr: auto, betas: [auto, 0.95]}}
  scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: auto, warmup_max_lr: auto}}
  zero_optimization:
    stage: 3
    reduce_bucket_size: auto
    stage3_param_persistence_threshold: auto
"""
AUTO = """\
distributed_type: DEEPSPEED
num_processes: 2
mixed_precision: bf16
deepspeed_config:
  train_micro_batch_size_per_gpu: auto
  zero_optimization:
    stage: auto
    offload_optimizer: {device: auto}
    offload_param: {device: auto}
    reduce_bucket_size: auto
    allgather_bucket_size: auto
"""
FACTS = ("--lr=1e-4", "--micro_batch=4", "--steps=1000", "--warmup_steps=100", "--hidden_size=8192")

Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Explain) -> Explain:
    """Run the command in a folder with `zero3.yaml`. Return exit code, output, and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZERO_PLUGIN_CONFIG_FILE", raising=False)
    (tmp_path / "zero3.yaml").write_text(ZERO3)
    return lambda *arguments: run_command("explain", *arguments)


def lines(output: str) -> dict[str, list[str]]:
    """Return each key's value and origin from the plain table."""
    rows = [line[2:].split("  ") for line in output.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    return {row[0]: row[1:] for row in cells}


def test_the_table_of_a_file(explain: Explain) -> None:
    """Written values have file and line. Values that were `auto`, and added values, have a reason."""
    code, output, _ = explain("zero3.yaml", *FACTS, "--accelerator=cuda", "--zero_stage=3")
    assert code == 0
    assert output.startswith("zero3.yaml: DeepSpeed on 2 × cuda\n\nlaunch\n")
    found = lines(output)
    expected = {
        "num_processes": ["2", "zero3.yaml:2"],
        "mixed_precision": ["bf16", "zero3.yaml:3"],
        "bf16.enabled": ["true", "rule: mixed_precision is bf16 (zero3.yaml:3:1)"],
        "bf16.check_grad_overflow": [
            "true",
            "DeepSpeed's default: a step with non-finite gradients is skipped",
        ],
        "train_micro_batch_size_per_gpu": ["4", "auto: --micro_batch"],
        "train_batch_size": ["8", "rule: 4 (micro batch) × 1 (accumulation) × 2 (processes)"],
        "zero_optimization.stage": ["3", "--zero_stage"],
        "zero_optimization.reduce_bucket_size": ["67108864", "auto: 1 × 8192², --hidden_size"],
        "zero_optimization.stage3_param_persistence_threshold": ["81920", "auto: 10 × 8192, --hidden_size"],
        "optimizer.params.lr": ["0.0001", "auto: from the command line"],
        "optimizer.params.betas": [
            "[0.9, 0.95]",
            "auto: DeepSpeed's default, unless the script gives one; the other elements are typed",
        ],
        "scheduler.params.total_num_steps": [
            "500",
            "auto: the command line's 1000 ÷ 2 processes (scheduler_counts: processes)",
        ],
        "scheduler.params.warmup_max_lr": ["0.0001", "auto: optimizer.params.lr"],
    }
    assert {key: found[key] for key in expected} == expected
    sections = [line for line in output.splitlines()[1:] if line and not line.startswith((" ", "note:"))]
    assert sections == ["launch", "precision", "batch", "zero_optimization", "optimizer", "scheduler", "engine"]
    assert "open" not in output
    places = {line.index(f"  {found[line.split()[0]][0]}  ", 30) for line in output.splitlines() if line[:2] == "  "}
    assert len(places) == 1, "the values stand in one column"


def test_what_a_run_would_fill_is_open(explain: Explain) -> None:
    """Values that a script may still give are shown as open, with the option that sets them. This is no error."""
    code, output, _ = explain("zero3.yaml")
    assert code == 0
    waiting = {key: origin for key, (value, origin) in lines(output).items() if value == "open"}
    assert waiting == {
        "train_micro_batch_size_per_gpu": "waits for the training DataLoader to tell its batch size (--micro_batch)",
        "train_batch_size": "waits for the micro batch to multiply (--micro_batch)",
        "zero_optimization.reduce_bucket_size": "waits for the model to tell its size (--hidden_size or --model)",
        "zero_optimization.stage3_param_persistence_threshold": (
            "waits for the model to tell its size (--hidden_size or --model)"
        ),
        "optimizer.params.lr": "waits for the optimizer to tell the learning rate (--lr)",
        "scheduler.params.total_num_steps": "waits for DummyScheduler to tell it (--steps)",
        "scheduler.params.warmup_num_steps": "waits for DummyScheduler to tell it (--warmup_steps)",
        "scheduler.params.warmup_max_lr": "waits for the optimizer to tell the learning rate (--lr)",
    }
    assert "8 open: a run determines them" in output


def test_an_optimizer_of_open_type(explain: Explain, tmp_path: Path) -> None:
    """An open optimizer's parameters are open too, each with its option, and are filled by the given values."""
    section = {"type": "auto", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-8}}
    (tmp_path / "open.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": section}))
    found = lines(explain("open.json")[1])
    assert found["optimizer.type"] == ["open", "waits for the optimizer to tell its type (--set)"]
    assert found["optimizer.params.lr"] == ["open", "waits for the optimizer to tell the learning rate (--lr)"]
    assert found["optimizer.params.weight_decay"][0] == "open"
    assert found["optimizer.params.weight_decay"][1].endswith("(--weight_decay)")
    code, output, _ = explain("open.json", "--micro_batch=1", "--lr=1e-4")
    assert (code, lines(output)["optimizer.params.lr"]) == (0, ["0.0001", "auto: from the command line"])
    assert "2 open: a run determines them" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--set", "zero_optimization.stage=5"],
            "--set zero_optimization.stage: 5 is not legal",
        ),
        (["--set", "zero_optimization.offload_param={device: nvme, nvme_path: auto}"], "auto cannot know a folder"),
        (["--set", "zero_optimisation.stage=2"], "Did you mean zero_optimization?"),
        (["--set", "mixed_precision=fp16", "--accelerator=cpu"], "DeepSpeed does not run fp16 on a cpu device"),
        (["--set", "train_batch_size=7", "--micro_batch=2"], "7 is not"),
        (["--set", "stage"], "'stage' is no key=value"),
        (["--set", "=3"], "'=3' is no key=value"),
        (["--set", "optimizer.params.betas=[0.9"], "--set optimizer.params.betas:1:1: not YAML"),
        (["--lr", "-1"], "--lr"),
        (["--world_size", "0"], "--world_size"),
        (["--num_processes=3", "--world_size=4"], "--world_size: 4, but --num_processes says 3"),
        (["--set", "num_processes=3", "--world_size=4"], "--world_size: 4, but --set num_processes says 3"),
        (["--model", "nowhere"], "--model: nowhere is not a folder"),
        (["--diff", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_what_no_run_can_mend_is_an_error(explain: Explain, arguments: list[str], expected: str) -> None:
    """A value that no run can fix is an error with exit code 2 and the wrong flag or place."""
    code, output, errors = explain("zero3.yaml", *arguments)
    assert code == 2
    assert expected in errors
    assert output == ""


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("zero_optimization.sub_group_size=2e8", "zero_optimization.sub_group_size", 200_000_000),
        ("deepspeed_config.gradient_clipping=0.5", "gradient_clipping", 0.5),
        ("gradient_accumulation_steps=4", "gradient_accumulation_steps", 4),
        ("scheduler_counts=steps", "scheduler_counts", "steps"),
        ("zero_optimization.prefetch_bucket_size=10", "zero_optimization.stage3_prefetch_bucket_size", 10),
        ("optimizer.params.betas=[0.8, 0.9]", "optimizer.params.betas", [0.8, 0.9]),
        ("aio={block_size: 5, thread_count: 2}", "aio.block_size", 5),
        ("offload_param_device=cpu", "zero_optimization.offload_param.device", "cpu"),
    ],
)
def test_set_takes_any_key_as_a_file_would(explain: Explain, text: str, key: str, value: Any) -> None:
    """`--set` takes numbers, lists and mappings as in YAML. Short fields and other spellings reach their key."""
    code, output, errors = explain("zero3.yaml", "--format=json", "--set", text)
    assert code == 0, errors
    row = next(row for row in json.loads(output)["values"] if row["path"] == key)
    assert (row["value"], row["kind"], row["where"]) == (value, "flag", f"--set {text.partition('=')[0]}")


def test_standard_input(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads standard input, as the file or as the second file of a difference."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ZERO3.encode())))
    code, output, _ = explain("-", "--accelerator=cpu")
    assert (code, output.splitlines()[0]) == (0, "<standard input>: DeepSpeed on 2 × cpu")
    assert lines(output)["num_processes"] == ["2", "<standard input>:2"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(ZERO3.replace("num_processes: 2", "").encode())))
    output = explain("zero3.yaml", "--diff", "-")[1]
    assert output.startswith("num_processes\n"), output
    code, _, errors = explain("-", "--diff", "-")
    assert code == 2
    assert "standard input can be read once" in errors


def test_json_tells_the_same(explain: Explain) -> None:
    """JSON has path, value, kind of origin, place and reason. An open field names what it waits for."""
    explained = json.loads(explain("zero3.yaml", "--format=json", "--world_size=4")[1])
    assert explained["files"] == ["zero3.yaml"]
    assert (explained["strategy"], explained["processes"]) == ("deepspeed", 4)
    rows = {row.pop("path"): row for row in explained["values"]}
    assert rows["zero_optimization.stage"] == {"value": 3, "kind": "file", "where": "zero3.yaml:9:5", "reason": ""}
    assert rows["optimizer.params.lr"] == {
        "value": "auto",
        "kind": "open",
        "where": "zero3.yaml:6:37",
        "reason": "optimizer to tell the learning rate",
    }
    assert rows["fp16.enabled"]["kind"] == "rule"


def test_what_deepspeed_would_be_given(explain: Explain) -> None:
    """The exact JSON for DeepSpeed is printed if no field is open. Otherwise open fields and their options are."""
    code, output, _ = explain("zero3.yaml", "--format=deepspeed", *FACTS)
    config = json.loads(output)
    assert (code, config["train_batch_size"], config["optimizer"]["params"]["lr"]) == (0, 8, 1e-4)
    assert "scheduler" not in config
    code, output, errors = explain("zero3.yaml", "--format=deepspeed")
    assert (code, output) == (2, "")
    assert "zero3.yaml:6:37: optimizer.params.lr: is open: it waits for the optimizer" in errors
    assert "Give --lr." in errors
    code, _, errors = explain("zero3.yaml", "--format=deepspeed", "--set", "distributed_type=MULTI_CPU")
    assert code == 2
    assert "DeepSpeed would get no config" in errors


def test_the_difference_of_two_files(explain: Explain, tmp_path: Path) -> None:
    """Only differing resolved values are listed, with values and origins. A missing value counts as its default."""
    other = ZERO3.replace("stage: 3", "stage: 2").replace("  train_micro_batch_size_per_gpu: auto\n", "")
    other += "    sub_group_size: 1e9\n    allgather_bucket_size: 1000\n"
    (tmp_path / "other.yaml").write_text(other)
    code, output, _ = explain("zero3.yaml", "--diff", "other.yaml")
    assert code == 0
    assert output.splitlines() == [
        "zero_optimization.stage",
        "  zero3.yaml  3          zero3.yaml:9",
        "  other.yaml  2          other.yaml:8",
        "zero_optimization.overlap_comm",
        "  zero3.yaml  true       DeepSpeed's default: DeepSpeed overlaps communication at stage 3 only",
        "  other.yaml  false      DeepSpeed's default: DeepSpeed overlaps communication at stage 3 only",
        "zero_optimization.allgather_bucket_size",
        "  zero3.yaml  500000000  DeepSpeed's default: the key is absent",
        "  other.yaml  1000       other.yaml:12",
    ]
    differences = json.loads(explain("zero3.yaml", "--diff", "other.yaml", "--format=json")[1])["differences"]
    assert differences[0]["path"] == "zero_optimization.stage"
    assert [row["value"] for row in differences[0]["values"]] == [3, 2]
    assert explain("zero3.yaml", "--diff", "zero3.yaml")[1] == "zero3.yaml and zero3.yaml resolve to the same values\n"


def test_two_files_can_be_compared_in_each_spelling(explain: Explain) -> None:
    """`--diff` is accepted before, between or after the names."""
    Path("other.yaml").write_text(Path("zero3.yaml").read_text().replace("bf16", "no"))
    (first, *others) = [
        explain(*words)[1]
        for words in (
            ("zero3.yaml", "--diff", "other.yaml"),
            ("zero3.yaml", "other.yaml", "--diff"),
            ("--diff", "zero3.yaml", "other.yaml"),
        )
    ]
    assert others == [first, first]
    assert "mixed_precision" in first
    code, _, errors = explain("zero3.yaml", "other.yaml", "zero3.yaml", "--diff")
    assert code == 2
    assert "Name two files." in errors


def test_several_files_are_explained_one_after_the_other(explain: Explain) -> None:
    """Several files are one list in JSON. The JSON for DeepSpeed takes one file."""
    Path("other.yaml").write_text("mixed_precision: bf16\n")
    output = explain("zero3.yaml", "other.yaml")[1]
    assert output.index("zero3.yaml: DeepSpeed") < output.index("other.yaml: ")
    both = json.loads(explain("zero3.yaml", "other.yaml", "--format=json")[1])
    assert [one["files"] for one in both] == [["zero3.yaml"], ["other.yaml"]]
    assert explain("zero3.yaml", "other.yaml", "--format=deepspeed")[0] == 2


def test_a_model_folder_without_a_size(explain: Explain, tmp_path: Path) -> None:
    """A model folder without a size is refused, unless the hidden size is given in addition."""
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    code, _, errors = explain("zero3.yaml", "--model=.")
    assert code == 2
    assert "--model: the size of . is unknown" in errors
    assert explain("zero3.yaml", "--model=.", "--hidden_size=64")[0] == 0


def test_a_model_folder(explain: Explain, tmp_path: Path) -> None:
    """The hidden size comes from config.json, the sizes from the weights. A bucket is never larger than the model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"text_config": {"hidden_size": 64}}')
    save_file({"w": np.zeros((100, 64), np.float32)}, model / "model.safetensors")
    found = lines(explain("zero3.yaml", "--model=model")[1])
    assert found["zero_optimization.reduce_bucket_size"] == ["6400", "auto: all parameters of the model"]
    assert found["zero_optimization.stage3_param_persistence_threshold"] == [
        "10000",
        "auto: 10 × 64, config.json.text_config.hidden_size, kept within 10,000 to 1,000,000",
    ]


def test_a_deepspeed_json_and_no_file(explain: Explain, tmp_path: Path) -> None:
    """A DeepSpeed config alone means ZeRO, as in `launch`. No file means one process without ZeRO."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    code, output, _ = explain("ds.json", "--accelerator=cpu")
    assert (code, output.splitlines()[0]) == (0, "ds.json: DeepSpeed on 1 × cpu")
    assert lines(output)["distributed_type"] == ["DEEPSPEED", "rule: a DeepSpeed config alone requests ZeRO"]
    assert explain("--accelerator=cpu")[1].startswith("no file: single on 1 × cpu\n")


FP16 = """{
  "fp16": {"enabled": true, "loss_scale": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": true, "adam_w_mode": true}},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
  "train_micro_batch_size_per_gpu": "auto"
}"""


def test_a_file_for_gpus_on_a_machine_without(
    explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the one that the file requests or needs. The first line states the assumption and its reason."""
    monkeypatch.setattr("zero_plugin.machine.hardware._GPU_DRIVERS", ())
    (tmp_path / "fp16.json").write_text(FP16)
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\n")
    (tmp_path / "two.yaml").write_text("gpu_ids: 0,1\n")
    (tmp_path / "cpu.yaml").write_text("distributed_type: DEEPSPEED\nuse_cpu: true\n")
    (tmp_path / "open.yaml").write_text("num_processes: 2\n")
    option = "(--accelerator)"
    for arguments, expected in (
        (["fp16.json"], f"DeepSpeed on 1 × cuda, assumed: fp16.enabled at fp16.json:2:12 needs a GPU {option}"),
        (["ddp.yaml"], f"single on 1 × cuda, assumed: distributed_type at ddp.yaml:1:1 requests GPUs {option}"),
        (["two.yaml"], f"single on 1 × cuda, assumed: gpu_ids at two.yaml:1:1 requests GPUs {option}"),
        (["open.yaml"], f"ddp on 2 × cpu, assumed: this machine has no GPU {option}"),
        (["cpu.yaml"], "DeepSpeed on 1 × cpu"),
        (["open.yaml", "--cpu"], "ddp on 2 × cpu"),
        (["open.yaml", "--accelerator=cuda"], "ddp on 2 × cuda"),
    ):
        code, output, errors = explain(*arguments)
        assert (code, output.splitlines()[:1]) == (0, [f"{arguments[0]}: {expected}"]), errors
    assert json.loads(explain("fp16.json", "--format=json")[1])["accelerator"] == "cuda"
    code, _, errors = explain("fp16.json", "--cpu")
    assert (code, "DeepSpeed does not run fp16 on a cpu" in errors) == (2, True)
    offload = "zero_optimization.offload_param={device: nvme, nvme_path: auto}"
    code, _, errors = explain("zero3.yaml", "--set", "mixed_precision=fp16", "--set", offload)
    assert (code, "fp16" in errors, "know a folder" in errors) == (2, False, True)
    monkeypatch.setattr("zero_plugin.cli.explain.has_gpu_driver", lambda: True)
    assert explain("open.yaml")[1].startswith("open.yaml: ddp on 2 × cuda, assumed: this machine has a GPU (")
    assert explain("cpu.yaml")[1].startswith("cpu.yaml: DeepSpeed on 1 × cpu\n")


def test_all_lists_the_defaults_of_keys_that_nobody_wrote(explain: Explain) -> None:
    """`--all` lists each key once. Written keys keep their own origin, unwritten ones have their default."""
    found = lines(explain("zero3.yaml", "--all")[1])
    assert found["zero_optimization.sub_group_size"] == ["1000000000", "DeepSpeed's default: the key is absent"]
    assert found["zero_optimization.stage"] == ["3", "zero3.yaml:9"]
    assert len(found) > 200


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_no_line_is_longer_than_it(explain: Explain, tmp_path: Path, columns: int) -> None:
    """Long names and reasons wrap between words at the terminal's width, values stay whole, and torch is not loaded."""
    (tmp_path / "long.json").write_text(
        '{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}}'
    )
    code = "import sys; from zero_plugin.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    done = subprocess.Popen([sys.executable, "-c", code, "explain", "long.json"], stdout=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)
    assert done.wait(timeout=60) == 0
    printed = re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).splitlines()
    assert printed[-1] == "False"
    assert max(map(len, printed)) <= columns
    assert "zero_optimization" in printed
    assert any(line.startswith("  stage   ") and line.rstrip().endswith("long.json:1") for line in printed)
    name = "  stage3_gather_16bit_weights_on_" if columns == 80 else "  stage3_gather_16bit_weights_on_model_save  true"
    assert any(line.startswith(name) for line in printed)


def test_a_plan_before_the_run(explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model and stated memory, the plan fills stage and devices with reasons. Otherwise they stay open."""
    monkeypatch.setattr(run_plan, "open_model", functools.cache(run_plan.open_model))  # traced once, not five times
    (tmp_path / "auto.yaml").write_text(AUTO)
    code, _, errors = explain("auto.yaml", "--sequence_length=64")
    assert code == 2
    assert "--sequence_length" in errors
    assert "it has an effect only with --model. Add --model FOLDER." in " ".join(errors.replace("│", " ").split())
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 8000}))
    known = ("--accelerator=cuda", "--model=model", "--sequence_length=64")
    waiting = lines(explain("auto.yaml", "--accelerator=cuda")[1])
    assert waiting["zero_optimization.stage"] == ["open", waiting["zero_optimization.stage"][1]]
    assert "--model with --gpu_memory" in waiting["zero_optimization.stage"][1]
    code, output, _ = explain("auto.yaml", *known, "--gpu_memory=80GiB", "--host_memory=64GiB")
    assert code == 0
    roomy = lines(output)
    assert roomy["zero_optimization.stage"][0] == "0"
    assert "by the plan the fastest that fits" in roomy["zero_optimization.stage"][1]
    assert roomy["zero_optimization.offload_optimizer.device"][0] == "none"
    assert "by the plan the largest that fits" in roomy["train_micro_batch_size_per_gpu"][1]
    cramped = lines(explain("auto.yaml", *known, "--gpu_memory=2200MiB", "--host_memory=64GiB")[1])
    assert cramped["zero_optimization.offload_optimizer.device"][0] == "cpu"
    code, _, errors = explain("auto.yaml", *known, "--gpu_memory=1GiB", "--host_memory=64GiB")
    assert code == 2
    assert "auto.yaml:7:5: zero_optimization: auto, but nothing fits" in errors
    guessed = explain("auto.yaml", *known[1:], "--gpu_memory=1GiB", "--host_memory=64GiB")[2]
    assert "nothing fits" in guessed
    assert "--accelerator" not in guessed  # stated memory means a GPU
