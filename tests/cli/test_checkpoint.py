"""`zero-plugin checkpoint`: its output, its files, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zero_plugin.checkpoint.convert.source import Source, Stored
from zero_plugin.checkpoint.convert.write import write_checkpoint
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.cli.main import main
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT

COLD = """
import sys
from zero_plugin.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"torch", "deepspeed", "numpy"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else end.code)
"""


def run(*arguments: object, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command. With `cold`, use a new process, which fails if torch is imported."""
    words = ["checkpoint", *map(str, arguments)]
    if cold:
        environment = {**os.environ, "COLUMNS": "100"}
        command = [sys.executable, "-c", COLD, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["zero-plugin", *words])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


def make_checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint with one trained bf16 weight and a frozen weight."""
    master = torch.arange(6.0).view(2, 3) / 7
    tensors = {
        (WEIGHT, "layer.weight"): Stored.of(master.bfloat16()),
        (WEIGHT, "frozen"): Stored.of(torch.ones(2)),
        (MASTER_WEIGHT, "layer.weight"): Stored.of(master),
        ("exp_avg", "layer.weight"): Stored.of(2 * master),
        ("exp_avg_sq", "layer.weight"): Stored.of(3 * master),
    }
    record = {
        "algorithm": "adamw",
        "groups": [{"params": ["layer.weight"], "settings": {"lr": 0.1, "betas": (0.9, 0.99)}}],
        "scalars": {"layer.weight": {"step": float(step)}},
        "loss_scale": {},
        "applied_steps": step,
        "skipped_in_a_row": 0,
    }
    origin = {"format": "DeepSpeed", "zero_stage": 2, "processes": 2, "versions": {"deepspeed": "0.19.8"}}
    source = Source(folder, "Net", tensors, {"head": "layer.weight"}, origin, record)
    write_checkpoint(source, folder, max_shard_bytes=2**31, overwrite=False, progress=lambda _: None)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write one checkpoint."""
    return make_checkpoint(tmp_path / "one", 7)


def test_inspect_says_what_is_in_a_checkpoint(checkpoint: Path) -> None:
    """`inspect` prints step, counts, version, run, and kinds with bytes, without importing torch."""
    manifest = read_manifest(checkpoint)
    replace(manifest, about={**manifest.about, "run": "0123456789abcdef"}).write(checkpoint)
    done = run("inspect", checkpoint, cold=True)
    assert done.returncode == 0, done.stderr
    for part in (
        "step        7",
        "precision   bf16",
        "imported from DeepSpeed, ZeRO stage 2, 2 processes, run 0123456789abcdef",
        "deepspeed 0.19.8",
        "Net: 8 parameters and buffers (6 trained, 2 frozen or buffers), 1 tied names, adamw",
        "optimizer/exp_avg.safetensors",
    ):
        assert part in done.stdout
    kinds = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert kinds["weight"] == ["2", "20", "bytes", "BF16,", "F32"]
    assert kinds["master"] == ["1", "24", "bytes", "F32"]
    assert "layer.weight" not in done.stdout


def test_inspect_lists_tensors_and_gives_json(checkpoint: Path) -> None:
    """`inspect` lists each tensor with shape, dtype and file, as text and as JSON."""
    done = run("inspect", checkpoint, "--tensors", cold=True)
    assert "weight      layer.weight  2×3    BF16  model.safetensors" in done.stdout
    content = json.loads(run("inspect", checkpoint, "--tensors", "--json", cold=True).stdout)
    assert content["kind"] == "checkpoint"
    assert content["step"] == 7
    assert content["damage"] is None
    assert content["models"][0]["trained"] == 6
    entry = {"kind": "master", "name": "layer.weight", "shape": [2, 3], "type": "F32"}
    assert {**entry, "file": "optimizer/masters.safetensors"} in content["tensors"]


def test_several_checkpoints_are_a_line_each_and_the_damaged_ones_are_marked(tmp_path: Path) -> None:
    """Checkpoints are listed by number, damaged ones marked. `verify` exits with 1 and names the newest good one."""
    for number in (2, 10):
        make_checkpoint(tmp_path / f"checkpoint_{number}", number)
    make_checkpoint(tmp_path / "checkpoint_11", 11)
    weights = tmp_path / "checkpoint_11" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (tmp_path / "checkpoint_12").mkdir()
    done = run("inspect", tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("checkpoint_")]
    assert [line.split()[0] for line in lines] == ["checkpoint_2", "checkpoint_10", "checkpoint_11", "checkpoint_12"]
    assert "damaged" in lines[3]
    assert "manifest.json" in lines[3]
    verified = run("verify", tmp_path)
    assert verified.returncode == 1
    assert f"{tmp_path}/checkpoint_10: complete" in verified.stdout
    assert "checkpoint_11/model.safetensors: layer.weight (weight) differs from its checksum" in verified.stdout
    assert verified.stdout.splitlines()[-1] == f"the newest complete one: {tmp_path}/checkpoint_10"
    alone = run("verify", tmp_path / "checkpoint_12", cold=True)
    assert alone.returncode == 2
    assert run("verify", tmp_path / "checkpoint_2").returncode == 0


def test_every_damage_is_named(checkpoint: Path) -> None:
    """`verify` names missing, truncated and changed files and exits with 1. `inspect` still prints the rest."""
    (checkpoint / "optimizer" / "masters.safetensors").unlink()
    states = checkpoint / "optimizer" / "exp_avg.safetensors"
    states.write_bytes(states.read_bytes()[:-1])
    (checkpoint / "random.json").write_text("{}\n")
    done = run("verify", checkpoint)
    assert done.returncode == 1
    assert "masters.safetensors is missing" in done.stdout
    assert f"exp_avg.safetensors has {states.stat().st_size} bytes instead of" in done.stdout
    assert "random.json differs from its checksum" in done.stdout
    assert len(done.stdout.splitlines()) == 5
    shown = run("inspect", checkpoint)
    assert "step        7" in shown.stdout
    assert "damaged: " in shown.stdout


def test_export_takes_the_masters(checkpoint: Path, tmp_path: Path) -> None:
    """fp32 export uses masters, not rounded weights. `keep` is bitwise the trained values. `inspect` reads both."""
    done = run("export", checkpoint, tmp_path / "hf", "--to", "hf", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    assert torch.equal(
        load_file(tmp_path / "hf" / "model.safetensors")["layer.weight"], torch.arange(6.0).view(2, 3) / 7
    )
    assert run("export", checkpoint, tmp_path / "all.safetensors", "--to", "single").returncode == 0
    assert load_file(tmp_path / "all.safetensors")["layer.weight"].dtype == torch.bfloat16
    shown = run("inspect", tmp_path / "hf", cold=True)
    assert "Hugging Face" in shown.stdout
    assert "F32" in shown.stdout


def test_universal_export_and_what_it_leaves_out(checkpoint: Path, tmp_path: Path) -> None:
    """A universal export has `latest_universal`. Standard error says that DeepSpeed reads no frozen weights."""
    done = run("export", checkpoint, tmp_path / "u", "--to", "deepspeed_universal")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "u" / "latest_universal").read_text() == "global_step7"
    zero = tmp_path / "u" / "global_step7" / "zero" / "layer.weight"
    assert {path.name for path in zero.iterdir()} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}
    assert "1 frozen weights" in done.stderr
    assert "universal" in run("inspect", tmp_path / "u", cold=True).stdout


def test_import_of_a_model_folder(tmp_path: Path) -> None:
    """A model folder is imported as a checkpoint, and an import of a checkpoint is refused."""
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "hf" / "model.safetensors")
    done = run("import", tmp_path / "hf", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "not trained" in run("inspect", tmp_path / "out", cold=True).stdout
    again = run("import", tmp_path / "out", tmp_path / "twice")
    assert again.returncode == 2
    assert "already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("inspect", "{}/none"), "none does not exist"),
        (("inspect", "{}/empty"), "a checkpoint of save_state"),
        (("inspect", "{}/cut"), "model.safetensors is not a readable safetensors file"),
        (("inspect", "{}/broken"), "manifest.json cannot be read"),
        (("export", "{}/none", "{}/out", "--to", "gguf"), "'deepspeed_universal'"),
        (("export", "{}/none", "{}/out", "--to", "hf"), "none does not exist"),
        (("import", "{}/none", "{}/out"), "none does not exist"),
    ],
    ids=str,
)
def test_wrong_folders_and_flags_are_one_screen(arguments: tuple[str, ...], part: str, tmp_path: Path) -> None:
    """A wrong folder or flag gives exit code 2, place and legal values, no traceback, no torch import, and no file."""
    for name in ("empty", "cut", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x00" * 3)
    (tmp_path / "broken" / "manifest.json").write_text("{")
    done = run(*(argument.format(tmp_path) for argument in arguments), cold=True)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 24
    assert not (tmp_path / "out").exists()
