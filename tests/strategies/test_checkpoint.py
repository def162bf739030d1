"""save_state and load_state among processes and within a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloading import prepared, wide_net, zero3
from on_paths import SEVERAL, in_processes, on_paths
from paths import (
    FURTHER,
    ZERO,
    assert_near,
    is_zero,
    listening,
    loss_of,
    make_net,
    own_batch,
    prepare_net,
    raised,
    running,
    same,
    take_step,
    weights,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import DummyOptim, DummyScheduler, Progress, ProjectConfiguration
from zero_plugin.checkpoint.tensor_files import RangeWriter
from zero_plugin.distributed import collectives
from zero_plugin.errors import CheckpointError, LoopError


@on_paths(*SEVERAL, daily=("ddp", "zero1", "zero3"))
def test_back_in_the_same_run(path: str, folder: Path) -> None:
    """The run that saved a checkpoint can load it and repeats its steps bitwise, also from before its first step."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        accelerator.save_state(folder / "0")
        first = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2)]
        accelerator.save_state(folder / "2")
        second = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 4)]
        end = weights(accelerator, model)
        accelerator.backward(loss_of(model, own_batch(9)))  # waiting gradients are dropped
        with listening() as messages:
            accelerator.load_state(folder / "2")
        assert not accelerator.is_main_process or any("the step has no effect" in message for message in messages)
        assert accelerator.sync_gradients  # as before the first micro-batch
        again = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 4)]
        assert again == second
        assert same(weights(accelerator, model), end)
        assert accelerator.load_state(folder / "0").steps == 0
        again = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(4)]
        assert again == first + second
        assert same(weights(accelerator, model), end)
        assert optimizer.applied_steps == 4


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_the_package_pickles_nothing(path: str, folder: Path) -> None:
    """The package itself sends only tensors and JSON, from `Accelerator` to the end.

    Only the script pickles objects.
    """
    callers = []

    def noting(send: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            callers.append(sys._getframe(1).f_globals["__name__"])
            return send(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            patch.setattr(dist, name, noting(getattr(dist, name)))
        collectives.gather_object([1])
        assert callers == ["zero_plugin.distributed.collectives"]
        callers.clear()
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        with running(path, project_config=project, gradient_accumulation_steps=2) as accelerator:
            data = TensorDataset(torch.zeros(16, 6), torch.zeros(16, dtype=torch.long))
            net = make_net()
            optimizer = DummyOptim(net.parameters(), lr=1e-2)
            model, optimizer, _, schedule = accelerator.prepare(
                net,
                optimizer,
                DataLoader(data, batch_size=2, shuffle=True),
                DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2),
            )
            with Progress(total=4, seconds=0) as progress:
                for index in range(4):
                    with accelerator.accumulate(model):
                        loss = take_step(accelerator, model, optimizer, own_batch(index))
                        schedule.step()
                        progress.update(index + 1, loss=loss, lr=1e-2)
            accelerator.save_state()
            accelerator.save_state(asynchronous=True)
            accelerator.load_state()
            accelerator.save_model(model, folder / "model")
            accelerator.get_state_dict(model)
            accelerator.wait_for_everyone()
        assert [name for name in callers if name.startswith("zero_plugin")] == []


class _Averaging(torch.optim.Optimizer):
    """An optimizer that counts its steps under its own name and, on request, keeps gradients in its own lists."""

    def __init__(self, params: Any, lr: float = 0.1, *, lists: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.lists = lists

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Descend along the mean of the last gradients."""
        self.state["count"] = count = self.state.get("count", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(())) + 1 / count
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                own["mean"] = own.get("mean", torch.zeros_like(p)).lerp(p.grad, 1 / count)
                p.sub_(group["lr"] / self.state["sum"].item() * own["mean"])
                if self.lists:
                    own["last"] = [p.grad.clone(), *own.get("last", [])[:2]]
                    p.sub_(0.01 * sum(own["last"]))  # type: ignore[arg-type]


@on_paths(*SEVERAL, daily=("ddp", "zero3", "zero3-cpu"))
def test_states_of_an_optimizers_own(path: str, folder: Path) -> None:
    """A named count is saved.

    Lists of a parameter are saved if it is stepped unpartitioned; otherwise they are an error.
    """
    for lists in (False, True):
        with running(path, deepspeed={"zero_allow_untested_optimizer": True}) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, _Averaging(net.parameters(), lists=lists))
            for index in range(2):
                take_step(accelerator, model, optimizer, own_batch(index))
            if lists and is_zero(path) and path != "zero0":
                raised(CheckpointError, "'last'", "list", by=lambda: accelerator.save_state(folder / "lists"))
                return
            accelerator.save_state(folder / str(lists))
            end = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 5)]
            accelerator.load_state(folder / str(lists))
            assert [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 5)] == end
        with running(path, deepspeed={"zero_allow_untested_optimizer": True}) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, _Averaging(net.parameters(), lists=lists))
            accelerator.load_state(folder / str(lists))
            assert [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 5)] == end


@on_paths("zero0", "zero1", "zero2", "zero3", "zero2-cpu", daily="zero3")
def test_states_of_muon(path: str, folder: Path) -> None:
    """After a resume DeepSpeed's Muon continues unchanged, also at another stage: its matrices and its inner Adam.

    No partition ends at the end of a matrix.
    """

    def train(
        path: str, first: int, last: int, load: Path | None = None, save: Path | None = None, *, in_memory: bool = False
    ) -> dict[str, Tensor]:
        further = {"reduce_scatter": False, "save_muon_momentum_buffer_in_memory": in_memory}
        zero = {"zero_optimization": {**(ZERO | FURTHER)[path], **further}}
        muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
        with running(path, deepspeed=zero | muon) as accelerator, torch.compiler.set_stance("force_eager"):
            net = make_net()
            model, optimizer = accelerator.prepare(net, DummyOptim(net.parameters()))
            if load is not None:
                accelerator.load_state(load)
            for index in range(first, last):
                take_step(accelerator, model, optimizer, own_batch(index))
                if index == 1 and save is not None:
                    accelerator.save_state(save)
            return weights(accelerator, model)

    wanted = {kind: train(kind, 0, 4, save=folder / kind) for kind in {path, "zero0"}}
    assert same(train(path, 2, 4, load=folder / path), wanted[path])
    if path == "zero3":
        assert same(train(path, 0, 4, save=folder / "kept", in_memory=True), wanted[path])
        assert same(train(path, 2, 4, load=folder / "kept", in_memory=True), wanted[path])
    assert_near(train(path, 2, 4, load=folder / "zero0"), wanted["zero0"], 1e-5)
    assert_near(train("zero0", 2, 4, load=folder / path), wanted["zero0"], 1e-5)


@on_paths("ddp", "zero0")
def test_states_of_other_shapes(path: str, folder: Path) -> None:
    """States smaller than their parameter, such as Adafactor's row and column sums, are saved and loaded."""
    ends = []
    for again in (False, True):
        with running(path) as accelerator:
            net = wide_net()
            model, optimizer = accelerator.prepare(net, torch.optim.Adafactor(net.parameters(), lr=0.1))
            if again:
                accelerator.load_state(folder / "2")
            else:
                for index in range(2):
                    take_step(accelerator, model, optimizer, own_batch(index))
                accelerator.save_state(folder / "2")
            ends.append([take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 4)])
    assert ends[0] == ends[1]


@on_paths("ddp", "zero1", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero1", "zero3"))
def test_a_new_layer(path: str, folder: Path) -> None:
    """A layer missing from the checkpoint gets the step count of the layers it is stepped with, which is logged."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        accelerator.save_state(folder / "1")
    with running(path) as accelerator:
        net = make_net()
        net.append(nn.Linear(net[-1].out_features, net[-1].out_features))
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        report = accelerator.load_state(folder / "1", strict=False)
        told = [
            line
            for line in report.not_restored
            if line.startswith(f"step of {len(net) - 1}.weight, which had none, is now 1")
        ]
        assert len(told) == (is_zero(path) and path != "zero0")


@on_paths("zero3", "zero3-cpu")
def test_a_forward_after_the_end(path: str, folder: Path) -> None:
    """For a model that stays partitioned, it raises an error that says so. Preparing the model again makes it run."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        net = accelerator.unwrap_model(model)
        accelerator.end_training()
        with torch.no_grad():
            raised(LoopError, "after its training has ended", "end_training()", by=lambda: net(own_batch(1)[0]))
    with running(path) as accelerator:
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        take_step(accelerator, model, optimizer, own_batch(0))


@on_paths("zero3")
def test_failure_on_one_is_everyones(path: str, folder: Path) -> None:
    """If one process cannot write, all raise with its reason. No file remains, and training continues."""
    with running(path) as accelerator, pytest.MonkeyPatch.context() as patch:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        write = RangeWriter.write

        def fail(*arguments: Any, **named: Any) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(28, os.strerror(28))
            return write(*arguments, **named)

        patch.setattr(RangeWriter, "write", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.save_state(folder / "saved")
        dist.barrier()
        assert not [path for path in folder.iterdir() if path.is_dir()]
        patch.undo()
        take_step(accelerator, model, optimizer, own_batch(1))
        accelerator.save_state(folder / "saved")
        if dist.get_rank() == 0:
            (folder / "saved" / "training.json").unlink()
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"training\.json is missing"):
            accelerator.load_state(folder / "saved")


@on_paths("ddp", "zero2")
def test_goes_on_within_a_shuffled_epoch(path: str, folder: Path) -> None:
    """The processes' parts of the interrupted epoch and of the next one equal those of an uninterrupted run."""
    data = TensorDataset(torch.arange(46.0).unsqueeze(1).expand(46, 8).contiguous(), torch.zeros(46, 4))

    def run(interrupted: bool) -> list[float]:
        seen: list[float] = []
        with running(path) as accelerator:
            torch.manual_seed(3)
            net = make_net()
            loader: Any = DataLoader(data, batch_size=2, shuffle=True)
            model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4), loader)
            if interrupted:
                torch.manual_seed(8)
                report = accelerator.load_state(folder / "saved")
                assert report.batches == [3]
                seen += [float(x[0, 0]) for x, _ in accelerator.skip_first_batches(loader, report.batches[0])]
            else:
                for index, (x, y) in enumerate(loader):
                    take_step(accelerator, model, optimizer, (x, y))
                    if index == 2:
                        accelerator.save_state(folder / "saved")
                    if index > 2:
                        seen.append(float(x[0, 0]))
            seen += [float(x[0, 0]) for x, _ in loader]
        return seen

    assert run(interrupted=False) == run(interrupted=True)


@on_paths("zero0", "zero2", "zero3", daily=("zero0", "zero3"))
def test_precisions_convert(path: str, folder: Path) -> None:
    """From 16-bit weights, fp32 loads the fp32 master weights.

    In the other direction, 16-bit weights are rounded from fp32.
    """
    with running(path, mixed_precision="bf16") as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        accelerator.save_state(folder / "halved")
        halved = weights(accelerator, model)
    masters = load_file(folder / "halved" / "optimizer" / "masters.safetensors")
    assert same(halved, load_file(folder / "halved" / "model.safetensors"))
    assert same(halved, {name: tensor.bfloat16() for name, tensor in masters.items()})
    assert not same({name: tensor.float() for name, tensor in halved.items()}, masters)
    with running("ddp") as accelerator:
        model, optimizer = prepare_net(accelerator)
        accelerator.load_state(folder / "halved")
        assert same(weights(accelerator, model), masters)
        take_step(accelerator, model, optimizer, own_batch(1))
        accelerator.save_state(folder / "whole")
    whole = load_file(folder / "whole" / "model.safetensors")
    with running(path, mixed_precision="bf16") as accelerator:
        model, optimizer = prepare_net(accelerator)
        accelerator.load_state(folder / "whole")
        assert same(weights(accelerator, model), {name: tensor.bfloat16() for name, tensor in whole.items()})
        accelerator.save_state(folder / "again")
    assert same(load_file(folder / "again" / "optimizer" / "masters.safetensors"), whole)


class Saved(nn.Sequential):
    """A net with the method that libraries use to write their models."""

    def save_pretrained(self, folder: str, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the net's own weights, or the given ones."""
        torch.save(self.state_dict() if state_dict is None else state_dict, Path(folder) / "own.bin")


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_hooks_take_the_weights_over(path: str, folder: Path) -> None:
    """Hooks work as in diffusers' scripts: the main process stores the user's module itself, and each process loads it.

    `state_dict`, `save_pretrained` and `load_state_dict` work on a hook's argument, and only there at stage 3. The
    first has only names and shapes before loading.
    """
    with running(path) as accelerator:
        net = Saved(*make_net())
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        take_step(accelerator, model, optimizer, own_batch(0))
        wanted = weights(accelerator, model)

        def save(models: list[Any], states: list[dict[str, Tensor]], output: str) -> None:
            assert models == [net]
            if accelerator.is_main_process:
                assert same(states.pop(), wanted)
                assert same(models[0].state_dict(), wanted)
                assert models[0][2].state_dict().keys() == {"weight", "bias"}
                models[0].save_pretrained(output)

        def load(models: list[nn.Module], source: str) -> None:
            stored, loaded = torch.load(Path(source) / "own.bin"), models.pop()
            assert not models
            assert _shapes(loaded.state_dict()) == _shapes(stored)
            loaded.load_state_dict(stored)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(folder / "saved")
        assert not (folder / "saved" / "model.safetensors").exists()
        after = take_step(accelerator, model, optimizer, own_batch(1))
        end = weights(accelerator, model)
        take_step(accelerator, model, optimizer, own_batch(2))
        accelerator.load_state(folder / "saved")
        assert take_step(accelerator, model, optimizer, own_batch(1)) == after
        assert same(weights(accelerator, model), end)
        if path.startswith("zero3"):
            raised(LoopError, "state_dict() of a Linear", "get_state_dict", by=model.state_dict)
            if accelerator.is_main_process:
                raised(LoopError, "save_pretrained()", "save_model", by=lambda: net.save_pretrained(str(folder)))
            raised(LoopError, "whole_weights", by=lambda: model.load_state_dict(wanted))


@on_paths("ddp", "zero0", "zero2", "zero3", daily=("ddp", "zero0", "zero3"))
def test_names_without_a_prefix(path: str, folder: Path) -> None:
    """`state_dict` of a prepared model has the user's names. `load_state_dict` takes these or a wrapper's names."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        wanted = weights(accelerator, model)
        with accelerator.whole_weights(model):
            assert same(model.state_dict(), wanted)
        take_step(accelerator, model, optimizer, own_batch(1))
        with accelerator.whole_weights(model):
            assert str(model.load_state_dict(wanted)) == "<All keys matched successfully>"
        assert same(weights(accelerator, model), wanted)
        take_step(accelerator, model, optimizer, own_batch(1))
        wrapped = {f"module.{name}": tensor for name, tensor in wanted.items()}
        with accelerator.whole_weights(model):
            model.load_state_dict(wrapped, strict=True)
        assert same(weights(accelerator, model), wanted)
        assert list(wrapped) == [f"module.{name}" for name in wanted], "the given one stays as it is"


@on_paths("zero2", "zero3")
def test_several_models(path: str, folder: Path) -> None:
    """Every model is stored and read, untrained ones too, each with its own optimizer."""
    with running(path) as accelerator:
        nets = [make_net() for _ in range(3)]
        adamw = torch.optim.AdamW(nets[0].parameters(), lr=1e-2)
        sgd = torch.optim.SGD(nets[1].parameters(), lr=1e-2, momentum=0.9)
        *models, _, _ = accelerator.prepare(*nets[:2], adamw, sgd)
        models.append(accelerator.prepare(nets[2]))
        for model, optimizer in zip(models, accelerator._optimizers, strict=False):
            take_step(accelerator, model, optimizer, own_batch(0))
        wanted = [weights(accelerator, model) for model in models]
        saved = accelerator.save_state(folder / "saved")
        assert (saved / "model_1" / "optimizer" / "momentum_buffer.safetensors").exists()
        assert not (saved / "model_2" / "optimizer").exists()
        for model, optimizer in zip(models, accelerator._optimizers, strict=False):
            take_step(accelerator, model, optimizer, own_batch(1))
        accelerator.load_state(saved)
        assert all(same(weights(accelerator, m), state) for m, state in zip(models, wanted, strict=True))
    with running("ddp") as accelerator:
        nets = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(3)]
        optimizers = [torch.optim.AdamW(nets[0].parameters()), torch.optim.SGD(nets[1].parameters(), 0.1, 0.9)]
        models = [*accelerator.prepare(*nets[:2], *optimizers)[:2], accelerator.prepare(nets[2])]
        accelerator.load_state(saved)
        assert all(same(weights(accelerator, m), state) for m, state in zip(models, wanted, strict=True))


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_buffers_are_the_first_ones(path: str, folder: Path) -> None:
    """If running statistics differ between processes, every save has process 0's, and loading gives those to all."""
    with running(path) as accelerator:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        take_step(accelerator, model, optimizer, own_batch(0))
        mean: Any = accelerator.unwrap_model(model)[1].running_mean
        mean.fill_(dist.get_rank())
        accelerator.save_state(folder / "state")
        accelerator.save_state(folder / "behind", asynchronous=True)
        accelerator.save_model(model, folder / "model")
        saved = [load_file(folder / name / "model.safetensors") for name in ("state", "model")]
        assert accelerator.wait_for_save() == folder / "behind"
        saved.append(load_file(folder / "behind" / "model.safetensors"))
        saved.append(weights(accelerator, model))
        assert [float(state["1.running_mean"].abs().max()) for state in saved] == [0.0] * 4
        accelerator.load_state(folder / "state")
        assert float(mean.abs().max()) == 0.0


@on_paths("ddp")
def test_a_machine_that_came_back(path: str, folder: Path) -> None:
    """The restarted launcher knows of no earlier run.

    The other launcher does, for both, and then the restarted one does too.
    """
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    with pytest.MonkeyPatch.context() as patch:
        for attempt, launches in enumerate([("one", "other"), ("new", "other"), ("new", "newer")]):
            place = folder / launches[dist.get_rank()] / "none_0" / f"attempt_{attempt}" / "0"
            place.mkdir(parents=True)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(place / "error.json"))
            with running(path, project_config=project) as accelerator:
                prepare_net(accelerator)
                report = accelerator.resume()
                assert (report is None) == (attempt == 0)
                assert accelerator.save_state().name == f"checkpoint_{attempt}"
            dist.barrier()
        runs = {json.loads(file.read_text())["run"] for file in folder.glob("checkpoints/*/manifest.json")}
        assert len(runs) == 1


class WithoutElements(nn.Module):
    """A model whose only parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


def with_elements(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors that have elements. Stage 3's optimizer has no states for the others."""
    return {name: tensor for name, tensor in load_file(file).items() if tensor.numel()}


@in_processes(2)
def test_odd_partitions(folder: Path) -> None:
    """However a stage cuts and orders its partitions, the files equal DDP's and load back into the partitions."""
    sections: dict[str, dict[str, Any]] = {
        "gathered": {"stage": 3},  # every parameter is below the threshold and stays unpartitioned between steps
        "sub-groups": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 40},
        "round-robin": {"stage": 2, "round_robin_gradients": True},
    }
    kept: dict[str, list[dict[str, Tensor]]] = {}
    for name in ("ddp", *sections):
        section = {"zero_optimization": sections[name]} if name in sections else None
        with running("zero3" if section else "ddp", deepspeed=section) as accelerator:
            net = nn.Sequential(WithoutElements(), *make_net())
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            if name != "ddp":
                accelerator.load_state(folder / "ddp")  # of two steps
                accelerator.save_state(folder / "read back")
                for file in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
                    read, wanted = (with_elements(folder / run / f"{file}.safetensors") for run in ("read back", "ddp"))
                    assert same(read, wanted), name
            for index in range(2, 4) if section else range(4):
                if index == 2 and name == "ddp":
                    accelerator.save_state(folder / "ddp")
                take_step(accelerator, model, optimizer, own_batch(index))
            saved = accelerator.save_state(folder / name / "end")
            assert_near(weights(accelerator, model), load_file(saved / "model.safetensors"), 1e-6)
            kept[name] = [with_elements(saved / f"{file}.safetensors") for file in ("model", "optimizer/exp_avg")]
        for got, wanted in zip(kept[name], kept["ddp"], strict=True):
            assert_near(got, wanted, 1e-4)


@in_processes(2)
def test_nvme_and_elsewhere(folder: Path) -> None:
    """State on NVMe is saved from NVMe and loaded to NVMe. Training resumes there, in memory and under DDP alike."""
    places = {
        "nvme": ("zero3", zero3(folder / "swap", optimizer="nvme", param="nvme")),
        "nvme-optimizer": ("zero3", zero3(folder / "swap", optimizer="nvme", param="cpu")),
        "memory": ("zero2", None),
        "ddp": ("ddp", None),
    }
    (folder / "swap").mkdir(exist_ok=True)
    for precision, pairs in (
        ("no", ("nvme nvme", "nvme ddp", "ddp nvme", "nvme-optimizer nvme")),
        ("bf16", ("nvme memory", "memory nvme")),
    ):
        results = {}
        for name in dict.fromkeys(pair.split()[0] for pair in pairs):
            path, section = places[name]
            with running(path, deepspeed=section, mixed_precision=precision) as accelerator:
                model, optimizer = prepared(accelerator)
                for index in range(2):
                    take_step(accelerator, model, optimizer, own_batch(index))
                accelerator.save_state(folder / name)
                losses = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 4)]
                results[name] = losses, weights(accelerator, model)
        for pair in pairs:
            source, target = pair.split()
            path, section = places[target]
            with running(path, deepspeed=section, mixed_precision=precision) as accelerator:
                net = wide_net()
                nn.init.zeros_(net[2].weight)
                model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
                take_step(accelerator, model, optimizer, own_batch(7))  # replaced states
                assert accelerator.load_state(folder / source, verify=True).not_restored == []
                losses = [take_step(accelerator, model, optimizer, own_batch(index)) for index in range(2, 4)]
                tolerance = 1e-5 if precision == "no" else 1e-2
                assert losses == pytest.approx(results[source][0], rel=tolerance), pair
                assert_near(weights(accelerator, model), results[source][1], tolerance)
