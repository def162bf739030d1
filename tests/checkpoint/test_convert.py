"""Conversions in one process: formats, safety, output files, and memory use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zero_plugin.checkpoint.convert import open_source
from zero_plugin.checkpoint.convert.deepspeed_files import plain_groups
from zero_plugin.checkpoint.convert.write import write_checkpoint, write_model, write_single_file, write_universal
from zero_plugin.checkpoint.load import find_differences
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT

SECOND = torch.arange(1.0, 8.0)


def quiet(_: int) -> None:
    """Show no progress."""


def deepspeed_folder(folder: Path, model: dict[str, Any], *ranks: dict[str, Any], protocol: int = 2) -> Path:
    """Write a stage-3 checkpoint with the given file contents."""
    folder.mkdir()
    for rank, optimizer in enumerate(ranks):
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", pickle_protocol=protocol)
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def stage_3(values: torch.Tensor, processes: int = 1, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Build model and optimizer files of bf16 `w` and `v`, trained by Adam. States are 2 and 3 times the values."""
    parts = [
        torch.cat([_padded(values, processes)[rank], _padded(SECOND, processes)[rank]]) for rank in range(processes)
    ]
    empty = torch.empty(0, dtype=torch.bfloat16)
    model = {
        "module": OrderedDict(w=empty, v=empty.clone(), b=torch.arange(3)),
        "param_shapes": [OrderedDict(w=values.shape, v=SECOND.shape)],
        "global_steps": 7,
        "skipped_steps": 2,
        "dp_world_size": processes,
        "ds_version": "0.19.8",
        **more,
    }
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "decoupled_weight_decay": True, "foreach": None, "params": [0]}
    optimizers = []
    for part in parts:
        state = {"step": torch.tensor(5.0), "exp_avg": 2 * part, "exp_avg_sq": 3 * part}
        base = {"state": {0: state}, "param_groups": [settings]}
        optimizers.append(
            {"zero_stage": 3, "partition_count": processes, "fp32_flat_groups": [part], "optimizer_state_dict": base}
        )
    return model, optimizers


def _padded(values: torch.Tensor, processes: int) -> tuple[torch.Tensor, ...]:
    share = -(-values.numel() // processes)
    padding = share * processes - values.numel()
    return torch.nn.functional.pad(values.reshape(-1), (0, padding)).split(share)


def imported(source: Path, target: Path, **options: Any) -> Path:
    """Import the folder and return the checkpoint."""
    opened = open_source(source, **options)
    write_checkpoint(opened, target, max_shard_bytes=2**31, overwrite=False, progress=quiet)
    return target


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Write a Hugging Face folder of two shards, with tied names, a bf16 weight and an unaligned tensor."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.arange(6.0).view(2, 3), "h": torch.ones(4, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"i": torch.arange(5)}, folder / "two.safetensors", metadata={"format": "pt", "tied.i": "i"})
    head = json.dumps({"o": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    head += b" " * ((3 - len(head)) % 8)
    raw = torch.tensor([1.5, 2.5]).numpy().tobytes()
    (folder / "three.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw)
    index = {"a": "one.safetensors", "h": "one.safetensors", "i": "two.safetensors", "o": "three.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Tiny"], "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_folder_becomes_a_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    """A model folder becomes a complete checkpoint: weights, tied names, configuration, tokenizer, no optimizer."""
    checkpoint = imported(model_folder, tmp_path / "out")
    assert find_damage(checkpoint) is None
    manifest = read_manifest(checkpoint)
    assert list(find_differences(checkpoint, manifest, quiet)) == []
    assert manifest.models[0].kind == "Tiny"
    assert manifest.models[0].tied == {"tied.i": "i"}
    stored = load_file(checkpoint / "model.safetensors")
    assert torch.equal(stored["a"], torch.arange(6.0).view(2, 3))
    assert stored["h"].dtype == torch.bfloat16
    assert stored["o"].tolist() == [1.5, 2.5]
    assert (checkpoint / "tokenizer.json").exists()
    assert read_nested(checkpoint / "training")["models"][0]["optimizer"] is None


def test_a_model_folder_in_another_type_and_in_shards(model_folder: Path, tmp_path: Path) -> None:
    """Floating-point weights are converted and integers are not. The configuration names the dtype, shards an index."""
    source = open_source(model_folder)
    write_model(source, tmp_path / "hf", dtype=torch.bfloat16, max_shard_bytes=30, overwrite=False, progress=quiet)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {"a", "h", "i", "o"}
    assert len(set(index.values())) > 1
    tensors = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index.items()}
    assert tensors["a"].dtype == tensors["h"].dtype == torch.bfloat16
    assert tensors["i"].dtype == torch.int64
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_one_file(model_folder: Path, tmp_path: Path) -> None:
    """One named file gets everything, and no other file is written. Another suffix is refused."""
    out = tmp_path / "there" / "all.safetensors"
    write_single_file(open_source(model_folder), out, dtype=None, overwrite=False, progress=quiet)
    assert [path.name for path in out.parent.iterdir()] == ["all.safetensors"]
    with safe_open(out, "pt") as opened:
        assert set(opened.keys()) == {"a", "h", "i", "o"}
        assert opened.metadata()["tied.i"] == "i"
    with pytest.raises(CheckpointError, match="already"):
        write_single_file(open_source(model_folder), out, dtype=None, overwrite=False, progress=quiet)
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        write_single_file(open_source(model_folder), tmp_path / "x.bin", dtype=None, overwrite=False, progress=quiet)


@pytest.mark.parametrize("processes", [1, 3, 4])
def test_shares_of_stage_3_are_joined(processes: int, tmp_path: Path) -> None:
    """Partitions of any number of ranks are joined: masters, states, settings. 16-bit weights are rounded masters."""
    values = torch.randn(5, 2)
    model, optimizers = stage_3(values, processes)
    checkpoint = imported(deepspeed_folder(tmp_path / "ds", model, *optimizers), tmp_path / "out")
    tensors = open_source(checkpoint).tensors
    assert torch.equal(tensors[MASTER_WEIGHT, "w"].unpartitioned(), values)
    assert torch.equal(tensors["exp_avg", "w"].unpartitioned(), 2 * values)
    assert torch.equal(tensors["exp_avg_sq", "v"].unpartitioned(), 3 * SECOND)
    assert torch.equal(tensors[WEIGHT, "w"].unpartitioned(), values.bfloat16())
    record = read_nested(checkpoint / "training")["models"][0]["optimizer"]
    assert record["applied_steps"] == 5
    assert record["algorithm"] == "adamw"
    assert record["scalars"] == {"w": {"step": 5.0}, "v": {"step": 5.0}}
    settings = {"lr": 0.5, "betas": (0.9, 0.99), "decoupled_weight_decay": True}
    assert record["groups"] == [{"params": ["w", "v"], "settings": settings}]
    write_model(
        open_source(checkpoint),
        tmp_path / "hf",
        dtype=torch.float32,
        max_shard_bytes=99,
        overwrite=False,
        progress=quiet,
    )
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], values)  # from the masters, not rounded


def deepspeed_folder_with(scaler: Any, folder: Path) -> Path:
    """Write an fp16 checkpoint with one of DeepSpeed's learning-rate schedulers."""
    vars(scaler).update(cur_scale=1024, cur_iter=9, last_overflow_iter=4, cur_hysteresis=2, dtype=torch.half)
    model, optimizers = stage_3(torch.randn(4), lr_scheduler={"last_batch_iteration": 4})
    optimizers[0] |= {"loss_scaler": scaler, "dynamic_loss_scale": True}
    return deepspeed_folder(folder, model, *optimizers)


def test_schedule_and_loss_scale_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are converted: DeepSpeed counts from -1, torch from 0. From the pickled scaler only numbers are read."""
    scaler = type("DynamicLossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    with monkeypatch.context() as patch:
        for name in ("deepspeed", scaler.__module__):
            patch.setitem(sys.modules, name, types.SimpleNamespace(DynamicLossScaler=scaler))
        folder = deepspeed_folder_with(scaler(), tmp_path / "ds")
    training = read_nested(imported(folder, tmp_path / "out") / "training")
    assert training["schedules"] == [{"last_epoch": 5}]
    scale = training["models"][0]["optimizer"]["loss_scale"]
    assert scale == {"value": 1024.0, "good_steps": 4, "patience": 2}


def test_room_is_looked_for_first(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk nothing is written, and no file is left."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=2**20))
    with pytest.raises(CheckpointError, match="does not fit"):
        imported(model_folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    """A missing rank and a truncated file are named."""
    model, optimizers = stage_3(torch.randn(8), 4)
    folder = deepspeed_folder(tmp_path / "ds", model, *optimizers[:3])
    with pytest.raises(CheckpointError, match="3 of the 4"):
        open_source(folder)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1.*cannot be read"):
        open_source(folder)


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def test_no_code_of_a_newer_pickle_runs(tmp_path: Path) -> None:
    """A newer pickle builds names while it is read, so they cannot be listed first. It is refused all the same."""
    model, optimizers = stage_3(torch.randn(4), 1, client=Evil(tmp_path / "ran"))
    folder = deepspeed_folder(tmp_path / "ds", model, *optimizers, protocol=4)
    with pytest.raises(CheckpointError, match="--trust_pickle"):
        open_source(folder)
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_pickle_runs_unless_trusted(tmp_path: Path) -> None:
    """Without trust, the class is named and no code runs. With trust, the file is read."""
    model, optimizers = stage_3(torch.randn(4), 1, client=Evil(tmp_path / "ran"))
    folder = deepspeed_folder(tmp_path / "ds", model, *optimizers)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir(.|\n)*--trust_pickle"):
        open_source(folder)
    assert not (tmp_path / "ran").exists()
    assert (WEIGHT, "w") in open_source(folder, trust_pickle=True).tensors
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layer_01-model_states.pt", "layer_"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor parallelism"),
        ("offloaded_tensors/x", "NVMe"),
    ],
)
def test_other_parallelism_is_refused(name: str, part: str, tmp_path: Path) -> None:
    """A checkpoint that was split by anything other than ZeRO is refused."""
    model, optimizers = stage_3(torch.randn(4))
    folder = deepspeed_folder(tmp_path / "ds", model, *optimizers)
    (folder / name).parent.mkdir(exist_ok=True)
    torch.save(model, folder / name)
    with pytest.raises(CheckpointError, match=part):
        open_source(folder)


def test_stage_0_is_read_only_where_it_is_certain_whose_a_state_is() -> None:
    """Nameless states are ambiguous with equal shapes in two groups, which is an error. In one group they are read."""
    module = OrderedDict(a=torch.zeros(2, 2), b=torch.ones(2, 2))
    state = {index: {"step": torch.tensor(1.0), "exp_avg": torch.full((2, 2), float(index))} for index in range(2)}
    notes: list[str] = []
    split = {"state": state, "param_groups": [{"lr": 1, "params": [0]}, {"lr": 2, "params": [1]}]}
    assert plain_groups({"module": module, "optimizer": split}, notes) == []
    assert len(notes) == 1
    whole = {"state": state, "param_groups": [{"lr": 1, "params": [0, 1]}]}
    (group,) = plain_groups({"module": module, "optimizer": whole}, notes)
    assert group.tensors["exp_avg", "b"].unpartitioned().tolist() == [[1, 1], [1, 1]]
    named = [{**entry, "param_names": [name]} for entry, name in zip(split["param_groups"], "ba", strict=True)]
    first, second = plain_groups({"module": module, "optimizer": {"state": state, "param_groups": named}}, notes)
    assert (first.parameters, second.parameters) == (["b"], ["a"])
    assert len(notes) == 1


@pytest.mark.parametrize("joined", [True, False], ids=["fused", "unfused"])
def test_copies_of_fp16_weights_are_told_by_their_values(joined: bool) -> None:
    """Without ZeRO, DeepSpeed's fp16 optimizers store nameless 32-bit copies: one tensor for a group, or separate ones.

    A copy that matches no parameter makes the states ambiguous, and that is noted.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 2), "b": (3,), "c": (2, 2)}
    copies = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    module = OrderedDict((name, copy.half()) for name, copy in copies.items())
    parts = [[copies["c"], copies["a"]], [copies["b"]]]
    if joined:
        parts = [[torch.cat([copy.flatten() for copy in group])] for group in parts]
    indices = iter(range(3))
    groups = [{"lr": lr, "params": [next(indices) for _ in group]} for lr, group in zip((1, 2), parts, strict=True)]
    flat = [copy for group in parts for copy in group]
    state = {index: {"step": 4, "exp_avg": 10 * copy} for index, copy in enumerate(flat)}
    saved: dict[str, Any] = {"optimizer_state_dict": {"param_groups": groups, "state": state}}
    saved |= {"fp32_groups_flat": flat} if joined else {"fp32_groups": parts}
    notes: list[str] = []
    found = plain_groups({"module": module, "optimizer": saved}, notes)
    assert [(group.settings["lr"], sorted(group.parameters)) for group in found] == [(1, ["a", "c"]), (2, ["b"])]
    for group in found:
        for name in group.parameters:
            assert torch.equal(group.tensors[MASTER_WEIGHT, name].unpartitioned(), copies[name])
            assert torch.equal(group.tensors["exp_avg", name].unpartitioned(), 10 * copies[name])
            assert group.scalars[name]["step"] == 4
    assert notes == []

    module["b"] = module["b"] + 1
    assert plain_groups({"module": module, "optimizer": saved}, notes) == []
    assert len(notes) == 1


def test_what_is_there_is_replaced_only_when_asked_and_only_if_known(model_folder: Path, tmp_path: Path) -> None:
    """A model is replaced completely, a folder of other files never. After an error everything is unchanged."""
    out, source = tmp_path / "out", open_source(model_folder)
    write_model(source, out, dtype=None, max_shard_bytes=30, overwrite=False, progress=quiet)
    with pytest.raises(CheckpointError, match="--overwrite"):
        write_model(source, out, dtype=None, max_shard_bytes=2**31, overwrite=False, progress=quiet)

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_model(source, out, dtype=None, max_shard_bytes=2**31, overwrite=True, progress=fail)
    assert sorted(path.name for path in out.iterdir()) == before
    write_model(source, out, dtype=None, max_shard_bytes=2**31, overwrite=True, progress=quiet)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    other = tmp_path / "home"
    other.mkdir()
    (other / "diary.txt").write_text("x")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a model"):
        write_model(source, other, dtype=None, max_shard_bytes=2**31, overwrite=True, progress=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model", "out"]


def test_what_was_there_comes_back_where_the_new_one_cannot_take_its_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older model is moved aside for a moment only, and comes back if the new one cannot take its name."""

    def fail(draft: Path, target: Path) -> None:
        raise CheckpointError("cannot be replaced")

    out, source = tmp_path / "out", open_source(model_folder)
    write_model(source, out, dtype=None, max_shard_bytes=2**31, overwrite=False, progress=quiet)
    monkeypatch.setattr("zero_plugin.checkpoint.convert.write.publish_draft", fail)
    with pytest.raises(CheckpointError, match="cannot be replaced"):
        write_model(source, out, dtype=torch.float16, max_shard_bytes=2**31, overwrite=True, progress=quiet)
    assert load_file(out / "model.safetensors")["a"].dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_universal_checkpoint_holds_each_parameter_by_itself(tmp_path: Path) -> None:
    """Each parameter has its own file, even from DeepSpeed's folder with one buffer for many: no foreign bytes."""
    model, optimizers = stage_3(torch.randn(50_000))
    folder = deepspeed_folder(tmp_path / "ds", model, *optimizers)
    write_universal(open_source(folder), tmp_path / "out", overwrite=False, progress=quiet)
    file = tmp_path / "out" / "global_step5" / "zero" / "v" / "exp_avg.pt"
    assert torch.equal(torch.load(file)["param"], 2 * SECOND)
    assert file.stat().st_size < 10_000


def test_a_universal_checkpoint_needs_an_optimizer(model_folder: Path, tmp_path: Path) -> None:
    """Weights alone are not enough to resume from. The message names what to write instead."""
    with pytest.raises(CheckpointError, match="--to hf"):
        write_universal(open_source(model_folder), tmp_path / "out", overwrite=False, progress=quiet)


def test_a_changed_byte_is_found(model_folder: Path, tmp_path: Path) -> None:
    """A changed byte is found in tensors and in any other file."""
    checkpoint = imported(model_folder, tmp_path / "out")
    manifest = read_manifest(checkpoint)
    for file, place in (("model.safetensors", manifest.models[0].places[WEIGHT, "a"].start), ("training.json", 3)):
        with (checkpoint / file).open("r+b") as opened:
            opened.seek(place)
            opened.write(b"\x7f")
    tensor, other = find_differences(checkpoint, manifest, quiet)
    assert tensor == "model.safetensors: a (weight) differs from its checksum"
    assert other == "training.json differs from its checksum"


MEASURED = """
import json, sys, threading, time
from pathlib import Path
import torch
from zero_plugin.checkpoint.convert import open_source
from zero_plugin.checkpoint.convert.deepspeed_files import plain_groups
from zero_plugin.checkpoint.convert.write import write_checkpoint
from zero_plugin.checkpoint.convert.write import write_model
from zero_plugin.checkpoint.convert.write import write_universal
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.load import find_differences

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def growth(step):
    begin, peak, ends = anonymous(), [0], threading.Event()
    def watch():
        while not ends.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    ends.set()
    watcher.join()
    return peak[0] - begin

folder = Path(sys.argv[1])
quiet = {"overwrite": False, "progress": lambda _: None}
torch.ones(10).to(torch.bfloat16).sum()
made = folder / "made"
print(json.dumps({
    "import": growth(lambda: write_checkpoint(open_source(folder / "ds"), made, max_shard_bytes=2**31, **quiet)),
    "verify": growth(lambda: list(find_differences(made, read_manifest(made), quiet["progress"]))),
    "hf": growth(lambda: write_model(
        open_source(made), folder / "hf", dtype=torch.float16, max_shard_bytes=2**31, **quiet)),
    "universal": growth(lambda: write_universal(open_source(made), folder / "universal", **quiet)),
}))
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Converting 210 MB with one tensor of 60 MB holds at most that tensor or a staging buffer in memory."""
    model, optimizers = stage_3(torch.ones(15_000_000), 2)
    deepspeed_folder(tmp_path / "ds", model, *optimizers)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert max(grown.values()) < 90_000_000, grown
