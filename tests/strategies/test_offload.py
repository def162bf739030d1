"""The bytes' places: the device of every state, and the NVMe files with their sizes and removal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from offloading import WIDTH, files_of, prepared, train, wide_net, zero3
from on_paths import in_processes
from paths import assert_near, loss_of, own_batch, running, weights
from torch import nn

from zero_plugin import Accelerator, DeepSpeedPlugin


def own_elements() -> dict[str, int]:
    """Count the elements of each parameter's partition on one process."""
    return {n: -(-p.numel() // dist.get_world_size()) for n, p in wide_net().named_parameters()}


def padded(elements: int) -> int:
    """Return the fp32 bytes of a swapped sub-group. The files are written in blocks of 1 KiB."""
    return -(-elements * 4 // 1024) * 1024


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value) and value.numel() > 1)


@in_processes(2)
def test_cpu_offload_of_the_optimizer(folder: Path) -> None:
    """Stage 2 + CPU: masters and moments of half the elements are in CPU memory, and the CPU kernel updates them."""
    with running("zero2-cpu", mixed_precision="bf16") as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 0)
        wrapper = optimizer.session.engine.optimizer
        assert type(optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
        assert wrapper.cpu_offload
        own = sum(own_elements().values())
        masters = wrapper.single_partition_of_fp32_groups
        moments = list(state_tensors(optimizer))
        assert len(moments) == 2 * len(masters)
        for tensors in (masters, moments):
            assert {(t.device.type, t.dtype) for t in tensors} == {("cpu", torch.float32)}
        for tensors, copies in ((masters, 1), (moments, 2)):
            assert own <= sum(t.numel() for t in tensors) / copies < own + 16
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@in_processes(2)
def test_cpu_offload_of_both(folder: Path) -> None:
    """Stage 3 + CPU of both: partitions, masters and moments are in CPU memory, and no file is written."""
    with running("zero3", deepspeed=zero3(folder, optimizer="cpu", param="cpu"), mixed_precision="bf16") as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 0)
        wrapper = optimizer.session.engine.optimizer
        assert type(optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
        assert wrapper.offload_optimizer
        assert wrapper.offload_param
        own = own_elements()
        for name, p in optimizer.session.module.named_parameters():
            assert p.numel() == 0, f"{name} is whole"
            assert (p.ds_tensor.device.type, p.ds_tensor.dtype) == ("cpu", torch.bfloat16)
            assert p.ds_tensor.numel() == own[name]
        masters, moments = wrapper.fp32_partitioned_groups_flat, list(state_tensors(optimizer))
        assert {(t.device.type, t.dtype) for t in (*masters, *moments)} == {("cpu", torch.float32)}
        assert sum(t.numel() for t in masters) == sum(own.values())
        assert sum(t.numel() for t in moments) == 2 * sum(own.values())
        assert list(folder.rglob("*")) == []


@in_processes(2)
def test_nvme_files_hold_every_state(folder: Path) -> None:
    """Stage 3 + NVMe of both: weights in the model's dtype, fp32 masters, two moments and gradients, of exact size."""
    for precision, name, width in (("no", "float32params", 4), ("bf16", "bfloat16params", 2)):
        config = zero3(folder, optimizer="nvme", param="nvme")
        with running("zero3", deepspeed=config, mixed_precision=precision) as accelerator:
            model, optimizer = prepared(accelerator)
            own = own_elements()
            weight, whole = own["2.weight"], padded(sum(own.values()))
            assert files_of(folder) == {name: weight * width, "master": whole}
            for step in range(2):
                train(accelerator, model, optimizer, step)
            assert files_of(folder) == {
                name: weight * width,
                "master": whole,
                "exp_avg": whole,
                "exp_avg_sq": whole,
                "gradient": weight * 4,
            }
            # None of it remains in memory.
            wrapper = optimizer.session.engine.optimizer
            assert [t.numel() for t in wrapper.fp32_partitioned_groups_flat] == [0]
            assert list(state_tensors(optimizer)) == []
            large = dict(optimizer.session.module.named_parameters())["2.weight"]
            assert (large.numel(), large.ds_tensor.numel()) == (0, 1)
            engines = [file for run in folder.iterdir() for file in run.iterdir()]
            assert len(engines) == 1
            assert engines[0].name.startswith("engine-")
        dist.barrier()
        assert list(folder.iterdir()) == []


@in_processes(2)
def test_nvme_paths_of_a_plugin(folder: Path) -> None:
    """`DeepSpeedPlugin`'s NVMe paths take effect: files are written there, with the other settings of its dict."""
    section = {"stage3_param_persistence_threshold": 0, "offload_param": {"max_in_cpu": 0, "buffer_size": 2_000_000}}
    plugin = DeepSpeedPlugin(
        {"zero_optimization": section},
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path=str(folder / "states"),
        offload_param_device="nvme",
        offload_param_nvme_path=str(folder / "weights"),
    )
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    try:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 0)
        assert files_of(folder / "weights") == {"float32params": own_elements()["2.weight"] * 4}
        assert files_of(folder / "states")["exp_avg"] == padded(sum(own_elements().values()))
    finally:
        accelerator.end_training()


@in_processes(2)
def test_nvme_optimizer_without_parameters(folder: Path) -> None:
    """`offload_param: cpu` with an NVMe optimizer: only states are files, and the weights stay in CPU memory."""
    with running("zero3", deepspeed=zero3(folder, optimizer="nvme", param="cpu")) as accelerator:
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 0)
        whole = padded(sum(own_elements().values()))
        found = files_of(folder)
        assert {kind: found[kind] for kind in ("master", "exp_avg", "exp_avg_sq")} == dict.fromkeys(
            ("master", "exp_avg", "exp_avg_sq"), whole
        )
        assert not [kind for kind in found if kind.endswith("params")]
        assert (
            dict(optimizer.session.module.named_parameters())["2.weight"].ds_tensor.numel()
            == own_elements()["2.weight"]
        )
    dist.barrier()
    assert list(folder.iterdir()) == []


@in_processes(2)
def test_gradients_go_to_nvme_by_sub_groups(folder: Path) -> None:
    """A device holds one sub-group's fp32 gradients at a time, not all of them until the last one is ready."""
    config = zero3(folder, optimizer="nvme", param="cpu")
    config["zero_optimization"]["sub_group_size"] = 400_000
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4))
    with running("zero3", deepspeed=config) as accelerator:
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
        wrapper = optimizer.session.engine.optimizer
        lengths = [sum(p.partition_numel() for p in group) for group in wrapper.fp16_groups]
        written: list[tuple[int, int]] = []
        swap_out = wrapper.optimizer_swapper.swap_out_gradients

        def record(*, gradient_tensors: list[torch.Tensor], **given: Any) -> None:
            written.append((len(wrapper.norm_for_param_grads), sum(t.numel() for t in gradient_tensors)))
            swap_out(gradient_tensors=gradient_tensors, **given)

        wrapper.optimizer_swapper.swap_out_gradients = record
        train(accelerator, model, optimizer, 0)
        known = [sum(map(len, wrapper.fp16_groups[: count + 1])) for count in range(len(lengths))]
        large = [found for found in zip(known, lengths, strict=True) if found[1] * 4 >= 2**20]  # otherwise not written
        assert len(large) == 3
        assert written == large


@in_processes(2)
def test_scaling_waits_for_the_copies() -> None:
    """A GPU copies gradients to the CPU asynchronously. The scaling multiplies only copies that have arrived."""
    with running("zero2-cpu") as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        wrapper = optimizer.session.engine.optimizer
        kept = list(wrapper.accumulated_grads_in_cpu.values())
        sent = [gradient.clone() for gradient in kept]
        for gradient in kept:
            gradient.zero_()

        class Copy:
            """A replacement for a device event that runs the copy itself, late."""

            def synchronize(self) -> None:
                for gradient, values in zip(kept, sent, strict=True):
                    gradient.copy_(values)

        wrapper._pending_offload_events[0] = Copy()
        optimizer.session.scale_gradients(0.5)
        assert kept
        assert all(torch.equal(gradient, 0.5 * values) for gradient, values in zip(kept, sent, strict=True))


@in_processes(2)
def test_engines_share_no_nvme_file(folder: Path) -> None:
    """Two engines with one `nvme_path` train as each would alone. Ending one leaves the other's files."""
    config = zero3(folder, optimizer="nvme", param="nvme")
    with running("zero3", deepspeed=config) as alone:
        model, optimizer = prepared(alone)
        for step in range(3):
            train(alone, model, optimizer, step)
        wanted = weights(alone, model)
    with running("zero3", deepspeed=config) as first:
        one, optimizer_one = prepared(first)
        train(first, one, optimizer_one, 0)
        with running("zero3", deepspeed=config) as second:
            two, optimizer_two = prepared(second)
            for step in range(3):
                train(second, two, optimizer_two, step)
            train(first, one, optimizer_one, 1)
            assert len(list(folder.glob("*/engine-*"))) == 2
            assert_near(weights(second, two), wanted, 1e-6)
        assert len(list(folder.glob("*/engine-*"))) == 1
        train(first, one, optimizer_one, 2)
        assert_near(weights(first, one), wanted, 1e-6)
    dist.barrier()
    assert list(folder.iterdir()) == []
