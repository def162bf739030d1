"""`save_model` on every path: each process writes its part, exactly, in the requested dtype."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloading import prepared, train, wide_net, zero3
from on_paths import ALL, in_processes, on_paths
from paths import FURTHER, ZERO, is_zero, listening, raised, running, same, take_steps, weights
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.checkpoint import save_model
from zero_plugin.checkpoint.tensor_files import RangeWriter
from zero_plugin.errors import CheckpointError

BUFFERS = {"mean", "forwards"}


class Net(nn.Module):
    """Tied weights, frozen ones, a parameter of one element, odd sizes, buffers: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 33)
        self.one = nn.Linear(33, 33, bias=False)
        self.two = nn.Linear(33, 33, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Conv2d(3, 2, 3).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(33, 4)
        self.register_buffer("mean", torch.zeros(33))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.one(torch.tanh(self.first(x)))))
        self.mean += x.detach().float().mean(0)  # another one on each process
        self.forwards += 1
        return self.last(self.gain * torch.tanh(x))


def trained(accelerator: Accelerator, memory_format: torch.memory_format | None = None) -> tuple[Any, Any]:
    """Return the net after two steps, and its optimizer."""
    torch.manual_seed(3)
    net = Net().to(memory_format=memory_format)
    optimizer: Any = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(net, optimizer)
    take_steps(accelerator, model, optimizer, range(2))
    return model, optimizer


def saved(accelerator: Accelerator, model: Any, folder: Path, **arguments: Any) -> dict[str, Tensor]:
    """Return what a loader reads of `save_model`'s output. The folder has no other files."""
    accelerator.save_model(model, folder, **arguments)
    accelerator.wait_for_everyone()
    names = {path.name for path in folder.iterdir()} - {"resolved_config.json"}
    if names == {"model.safetensors"}:
        found = load_file(folder / "model.safetensors")
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
        found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    accelerator.wait_for_everyone()
    return found


def masters_of(accelerator: Accelerator, folder: Path) -> dict[str, Tensor]:
    """Return the optimizer's copies of the weights, from a checkpoint."""
    accelerator.save_state(folder)
    file = folder / "optimizer" / "masters.safetensors"
    found = load_file(file if file.exists() else folder / "model.safetensors")
    accelerator.wait_for_everyone()
    return {name: tensor for name, tensor in found.items() if name not in BUFFERS and "frozen" not in name}


@on_paths(*ALL, daily=("single", "zero1", "zero3"))
def test_values(path: str, folder: Path) -> None:
    """One file or shards over an older model, every dtype, the trained weights alone: each is exact."""
    for precision in ("no", "bf16"):
        with running(path, deepspeed=_gathering_nothing(path), mixed_precision=precision) as accelerator:
            # DeepSpeed takes only weights in the usual memory format.
            model, _ = trained(accelerator, None if is_zero(path) else torch.channels_last)
            wanted = weights(accelerator, model)
            assert torch.equal(wanted.pop("two.weight"), wanted["one.weight"])
            assert wanted.keys() > BUFFERS
            for limit in (2000, "10GB", 600, 601):
                found = saved(accelerator, model, folder / precision, max_shard_size=limit)
                assert same(found, wanted), (precision, limit)
                assert (len(list((folder / precision).glob("*.safetensors"))) > 1) == (limit != "10GB")
            masters = masters_of(accelerator, folder / f"{precision}-state")
            is_rounded = is_zero(path) and precision == "bf16"
            assert same(masters, {name: wanted[name] for name in masters}) != is_rounded
            for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), (torch.bfloat16, torch.bfloat16)):
                found = saved(accelerator, model, folder / f"{precision}-{dtype}", dtype=name)
                expected = {n: t if n in BUFFERS else masters.get(n, t).to(dtype) for n, t in wanted.items()}
                assert same(found, expected), (precision, dtype)
            part = folder / f"{precision}-part"
            found = saved(accelerator, model, part, trainable_only=True)
            assert found.keys() == masters.keys()
            assert same(found, {name: wanted[name] for name in masters})
            with safe_open(part / "model.safetensors", "pt") as file:
                told = {"contains": "the parameters that were trained", "format": "pt", "two.weight": "one.weight"}
                assert file.metadata() == told
            assert set(accelerator.load_weights(model, part, strict=False).loaded) >= masters.keys()
            assert same(weights(accelerator, model), {**wanted, "two.weight": wanted["one.weight"]})
            assert not [path for path in folder.rglob(".*") if path.suffix != ".lock"]
            accelerator.wait_for_everyone()


@on_paths("ddp", "zero3")
def test_failure_leaves_the_model(path: str, folder: Path) -> None:
    """If one process cannot write, all raise with its reason, and the existing model is unchanged."""
    with running(path) as accelerator, pytest.MonkeyPatch.context() as patch:
        model, optimizer = trained(accelerator)
        before = saved(accelerator, model, folder / "saved", max_shard_size=1000)
        train(accelerator, model, optimizer, 2)
        assert not same(before, weights(accelerator, model))
        write, is_last = RangeWriter.write, dist.get_rank() == dist.get_world_size() - 1
        old = {file.name: file.read_bytes() for file in (folder / "saved").iterdir()}

        def fail(self: Any, fragment: Any, *arguments: Any, **options: Any) -> Any:
            if is_last and fragment.name == "one.weight":
                raise OSError(28, os.strerror(28))
            return write(self, fragment, *arguments, **options)

        patch.setattr(RangeWriter, "write", fail)
        for size in (1000, "10GB"):
            with pytest.raises(CheckpointError, match="No space left"):
                accelerator.save_model(model, folder / "saved", max_shard_size=size)
            accelerator.wait_for_everyone()
            assert {file.name: file.read_bytes() for file in (folder / "saved").iterdir()} == old
        patch.undo()
        after = saved(accelerator, model, folder / "saved", max_shard_size=1000)
        assert all(
            torch.equal(after[name], tensor) for name, tensor in weights(accelerator, model).items() if name in after
        )


@on_paths("zero2-one-process", "ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_without_a_shared_folder(path: str, folder: Path) -> None:
    """If a process does not see the folder, the main one writes everything, masters too, also after an error there."""
    with running(path, mixed_precision="bf16") as accelerator, pytest.MonkeyPatch.context() as patch:
        model, _ = trained(accelerator)
        exact = saved(accelerator, model, folder / "ranges", dtype="fp32")
        patch.setattr(save_model, "missing_marks", lambda draft: ([1], ""))
        if dist.get_rank() > 0:  # whose disk it is not
            patch.setattr(os, "pwrite", lambda *_: pytest.fail("written by another process"))
        with listening() as said:
            assert same(saved(accelerator, model, folder / "whole", dtype="fp32"), exact)
        alone = [line for line in said if "main process writes alone" in line]
        assert len(alone) == (dist.get_rank() == 0)
        patch.setattr(RangeWriter, "write", _no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.save_model(model, folder / "whole")


@on_paths("zero3")
def test_what_ranges_do_not_reach(path: str, folder: Path) -> None:
    """Weights that byte ranges cannot separate are gathered. Their fp32 master weights are an error."""
    with running(path, mixed_precision="bf16") as accelerator, pytest.MonkeyPatch.context() as patch:
        model, optimizer = trained(accelerator)
        wanted = {name: tensor for name, tensor in weights(accelerator, model).items() if name != "two.weight"}

        def refuse() -> Any:
            raise CheckpointError("nobody knows where they are")

        patch.setattr(optimizer.session, "weight_fragments", refuse)
        assert same(saved(accelerator, model, folder / "whole", max_shard_size=1000), wanted)
        found = saved(accelerator, model, folder / "part", dtype="fp16", trainable_only=True)
        assert same(found, {name: wanted[name].half() for name in found})
        raised(
            CheckpointError,
            "fp32 master weights",
            "nobody knows where they are",
            by=lambda: accelerator.save_model(model, folder / "whole", dtype="fp32"),
        )


@on_paths("zero2-one-process", "zero2", "zero3", daily="zero3")
def test_masters_follow_what_is_written(path: str, folder: Path) -> None:
    """`fp32` saves weights that the script wrote, and a checkpoint holds them, before the next step too."""
    with running(path, mixed_precision="bf16") as accelerator:
        model, _ = trained(accelerator)
        for call in ("save_model", "save_state"):
            with accelerator.whole_weights(model), torch.no_grad():
                accelerator.unwrap_model(model).gain.add_(1)
            gain = weights(accelerator, model)["gain"].float()
            if call == "save_model":
                found = saved(accelerator, model, folder / call, dtype="fp32")
            else:
                found = masters_of(accelerator, folder / call)
            assert torch.equal(found["gain"], gain), call


@on_paths("zero3")
def test_refusals(path: str, folder: Path) -> None:
    """Every process names a file in the way, and the run can continue."""
    with running(path) as accelerator:
        net = Net()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.first.parameters(), lr=0.1))
        (folder / "file").touch()
        call = lambda: accelerator.save_model(model, folder / "file" / "saved", trainable_only=True)  # noqa: E731
        raised(CheckpointError, "saved", "Not a directory", by=call)
        accelerator.save_model(model, folder / "saved", trainable_only=True)


@in_processes(2)
def test_nvme(folder: Path) -> None:
    """Trained weights on NVMe come from their masters. Frozen weights and those of untrained models are unchanged."""
    for precision in ("no", "bf16"):
        config = zero3(folder / "nvme", optimizer="nvme", param="nvme")
        with running("zero3", deepspeed=config, mixed_precision=precision) as accelerator:
            model, optimizer = prepared(accelerator)
            train(accelerator, model, optimizer, 0)
            wanted = weights(accelerator, model)
            assert same(saved(accelerator, model, folder / precision), wanted)
            masters = masters_of(accelerator, folder / f"{precision}-state")
            assert same(saved(accelerator, model, folder / f"{precision}-32", dtype="fp32"), masters)
            assert same(masters, wanted) == (precision == "no")
            train(accelerator, model, optimizer, 1)
            frozen = accelerator.prepare(wide_net().requires_grad_(False))
            found = saved(accelerator, frozen, folder / f"{precision}-frozen", dtype="fp32")
            dtype = torch.float32 if precision == "no" else torch.bfloat16
            assert same(found, {name: tensor.to(dtype).float() for name, tensor in wide_net().state_dict().items()})


def _gathering_nothing(path: str) -> dict[str, Any]:
    if path not in ZERO | FURTHER:
        return {}
    return {"zero_optimization": {**(ZERO | FURTHER)[path], "stage3_gather_16bit_weights_on_model_save": False}}


def _no_space(*_: Any, **__: Any) -> Any:
    raise OSError(28, os.strerror(28))
