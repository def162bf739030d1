"""save_state(asynchronous=True): its contents, its order with other saves, and what remains after a failure."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param
from offloading import prepared, zero3
from on_paths import on_paths
from paths import is_zero, make_net, own_batch, prepare_net, raised, running, same, take_step, weights
from torch import Tensor

from zero_plugin.checkpoint import background
from zero_plugin.checkpoint.background import Snapshot
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError


class Average:
    """A registered object: a tensor that changes in place."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value.copy_(state["value"])


class Swapping(torch.optim.SGD):
    """An optimizer whose own methods change its parameters without raising their version counters."""

    def eval(self) -> None:
        self.double()

    def double(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(2)
                self.state[p]["momentum_buffer"].data.mul_(2)


@contextmanager
def writing_by(write: Callable[..., int]) -> Iterator[None]:
    """Send the writes of other threads to `write`, which gets the real `os.pwrite` as first argument."""
    real, script = os.pwrite, threading.current_thread()

    def pwrite(*args: Any) -> int:
        return real(*args) if threading.current_thread() is script else write(real, *args)

    os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = real


@contextmanager
def held_disk() -> Iterator[threading.Event]:
    """Hold back all writes of the background save until the event is set."""
    release = threading.Event()

    def write(real: Callable[..., int], *args: Any) -> int:
        assert release.wait(20)
        return real(*args)

    with writing_by(write):
        try:
            yield release
        finally:
            release.set()


@contextmanager
def held_copies() -> Iterator[threading.Event]:
    """Hold back the background copies while the event is clear. The event starts out set."""
    release, real = threading.Event(), Snapshot.finish
    release.set()

    def finish(self: Snapshot) -> None:
        assert release.wait(20)
        real(self)

    Snapshot.finish = finish
    try:
        yield release
    finally:
        release.set()
        Snapshot.finish = real


def released_by(release: threading.Event, wait: Callable[[], None]) -> Callable[[], None]:
    """Return a function that sets the event and then calls `wait`."""

    def call() -> None:
        release.set()
        wait()

    return call


@contextmanager
def full_disk() -> Iterator[None]:
    """Make background writes fail on the last process."""

    def write(real: Callable[..., int], *args: Any) -> int:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with writing_by(write):
        yield


@contextmanager
def available_memory(size: int) -> Iterator[None]:
    """Make the last process read this number of bytes as available memory."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with patch.object(background, "available_cpu_memory", lambda: size) if is_last else nullcontext():
        yield


def content_of(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint, bit for bit, without its time of creation."""
    content: dict[str, Any] = {
        str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()
    }
    manifest = json.loads(content.pop("manifest.json"))
    return {**content, "manifest.json": {**manifest, "created": None, "run": None, "order": None, "xxh3": None}}


def names_in(folder: Path) -> set[str]:
    """Return the names in a folder, hidden ones too, once all processes have arrived."""
    dist.barrier()
    return {path.name for path in folder.iterdir() if path.is_dir()}


@on_paths("single", "ddp", "zero0", "zero2", "zero3", "zero2-cpu", "zero3-nvme", daily=("ddp", "zero2", "zero3-nvme"))
def test_holds_what_a_synchronous_one_holds(path: str, folder: Path) -> None:
    """It holds the same bits as a synchronous save, though everything changes before the writes begin.

    The second save, into the memory of the first, does too. load_state can resume from it immediately.
    """
    nvme = path == "zero3-nvme"
    section = zero3(folder / "swap", optimizer="nvme", param="nvme") if nvme else None
    precision = "no" if path in ("single", "ddp", "zero2-cpu") else "bf16"
    with running("zero3" if nvme else path, deepspeed=section, mixed_precision=precision) as accelerator:
        model, optimizer = (prepared if nvme else prepare_net)(accelerator)
        average = Average()
        accelerator.register_for_checkpointing(average)
        for index in range(2):
            take_step(accelerator, model, optimizer, own_batch(index))
            at_hand, behind = folder / f"at_hand_{index}", folder / f"behind_{index}"
            accelerator.save_state(at_hand)
            before = weights(accelerator, model)
            with held_disk() as release:
                assert accelerator.save_state(behind, asynchronous=True) == behind
                average.value += 1
                take_step(accelerator, model, optimizer, own_batch(index + 5))
                assert not same(weights(accelerator, model), before)
                assert not behind.exists()
                release.set()
                if index == 0:
                    assert accelerator.wait_for_save() == behind
                    assert accelerator.wait_for_save() is None
                else:
                    assert accelerator.load_state(behind, verify=True).folder == behind
                    assert same(weights(accelerator, model), before)
            assert content_of(behind) == content_of(at_hand)
            assert average.value.tolist() == [1.0] * 3


@on_paths("ddp", "zero3", "zero2-cpu")
def test_a_state_that_changes_meanwhile_is_refused(path: str, folder: Path) -> None:
    """If a script changes a value in place during the copy, the save raises an error and leaves no checkpoint."""
    with running(path) as accelerator, held_copies() as release:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        stepped, state = next(iter(optimizer.state.items()))
        changed = {"exp_avg": state["exp_avg"]}
        if is_zero(path):
            changed["weight"] = stepped.detach()
        for kind, tensor in changed.items():
            release.clear()
            accelerator.save_state(folder / "changed", asynchronous=True)
            tensor.mul_(2)
            release.set()
            raised(CheckpointError, f"the {kind} of ", "was changed while it was copied", by=accelerator.wait_for_save)
    assert names_in(folder) == set()


@on_paths("single", "ddp", "zero2", "zero3", daily=("ddp", "zero2"))
def test_what_a_script_changes_meanwhile_is_not_in_it(path: str, folder: Path) -> None:
    """Weights are copied before the script can write to them. Other changes of master weights or states wait."""
    with running(path) as accelerator, held_copies() as release:
        net = make_net()
        model, optimizer = accelerator.prepare(net, Swapping(net.parameters(), lr=1e-2, momentum=0.9))
        take_step(accelerator, model, optimizer, own_batch(0))

        def set_masters() -> None:
            for p in accelerator.unwrap_model(model).parameters():
                safe_set_full_fp32_param(p, torch.zeros(getattr(p, "ds_shape", p.shape)))

        changes: list[Callable[[], Any]] = [
            *([] if is_zero(path) else [optimizer.eval]),  # ZeRO refuses it: the model's weights would not follow
            lambda: optimizer.double(),
            lambda: take_step(accelerator, model, optimizer, own_batch(1)),
            *([set_masters] if is_zero(path) else []),
        ]
        for number, change in enumerate(changes):
            at_hand, behind = folder / f"at_hand_{number}", folder / f"behind_{number}"
            accelerator.save_state(at_hand)
            release.clear()
            accelerator.save_state(behind, asynchronous=True)
            with accelerator.whole_weights(model), torch.no_grad():
                for p in accelerator.unwrap_model(model).parameters():
                    p.data.mul_(2)
            optimizer.session.before_change = released_by(release, optimizer.session.before_change)
            change()
            assert release.is_set()
            assert accelerator.wait_for_save() == behind
            assert content_of(behind) == content_of(at_hand), number


@on_paths("ddp")
def test_one_that_is_interrupted_holds_nobody_up(path: str, folder: Path) -> None:
    """If Ctrl-C reaches one process before its first background save, the others' threads end and no file remains."""
    with running(path) as accelerator:
        prepare_net(accelerator)
        if dist.get_rank() == dist.get_world_size() - 1:
            real = Snapshot.take

            def take(*args: Any) -> None:
                real(*args)
                raise KeyboardInterrupt

            accelerator._run.background.memory.take = take.__get__(accelerator._run.background.memory)
            with pytest.raises(KeyboardInterrupt):
                accelerator.save_state(folder / "state", asynchronous=True)
        else:
            accelerator.save_state(folder / "state", asynchronous=True)
            _, writing = accelerator._run.background.running
            assert "another process was interrupted" in str(writing.exception())
            accelerator._run.background.running = None  # to tell it is collective
        assert names_in(folder) == set()


@on_paths("single", "ddp")
def test_what_is_closed_is_let_go(path: str, folder: Path) -> None:
    """A model that was made inside inference_mode is saved too. free_memory releases a model during its save."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        with held_disk():
            with torch.inference_mode():
                accelerator.save_state(folder / "state", asynchronous=True)
            kept = weakref.ref(accelerator.unwrap_model(model))
            model, optimizer = accelerator.free_memory(model, optimizer)
            gc.collect()
            assert kept() is None
        assert accelerator.wait_for_save() == folder / "state"


@on_paths("single", "zero3")
def test_one_at_a_time(path: str, folder: Path) -> None:
    """The next save of either kind, and the end of training, wait for the running save.

    Old checkpoints go after that.
    """
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        following: list[Callable[[Path], Any]] = [
            lambda target: accelerator.save_state(target, asynchronous=True, total_limit=2),
            lambda target: accelerator.save_state(target, total_limit=2),
            lambda _: accelerator.end_training(),
        ]
        for number, call in enumerate(following):
            accelerator.wait_for_save()
            with held_disk() as release:
                take_step(accelerator, model, optimizer, own_batch(number))
                first = accelerator.save_state(folder / f"step_{2 * number}", asynchronous=True, total_limit=2)
                timer = threading.Timer(0.2, release.set)
                timer.start()
                call(folder / f"step_{2 * number + 1}")
                assert release.is_set()
                assert find_damage(first) is None
                timer.join()
    assert names_in(folder) == {"step_3", "step_4"}


@on_paths("ddp", "zero2")
def test_a_failure_is_told_by_the_next_call(path: str, folder: Path) -> None:
    """The next call raises the error on every process and names the checkpoint. Older ones stay, later saves work."""
    with running(path) as accelerator:
        prepare_net(accelerator)
        accelerator.save_state(folder / "step_0")
        calls: list[Callable[[], Any]] = [
            lambda: accelerator.save_state(folder / "step_2"),
            lambda: accelerator.save_state(folder / "step_2", asynchronous=True),
            lambda: accelerator.load_state(folder / "step_0"),
            accelerator.wait_for_save,
            accelerator.end_training,
        ]
        for call in calls:
            printed = io.StringIO()
            with full_disk(), redirect_stderr(printed):
                accelerator.save_state(folder / "step_1", asynchronous=True, total_limit=1)
                raised(CheckpointError, str(folder / "step_1"), "No space left", by=call)
            assert ("step_1 in the background: " in printed.getvalue()) == (dist.get_rank() == 0)
            assert names_in(folder) == {"step_0"}
            if call is calls[0]:
                accelerator.save_state(folder / "step_0", asynchronous=True, total_limit=1)
                assert accelerator.wait_for_save() == folder / "step_0"


@on_paths("ddp")
def test_without_memory_it_is_not_behind(path: str, folder: Path) -> None:
    """If the copy does not fit on one machine, a warning gives both sizes. Memory of an earlier copy is not counted."""
    with running(path) as accelerator:
        model, optimizer = prepare_net(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))

        def save(name: str) -> str:
            printed = io.StringIO()
            with held_disk() as release, available_memory(2048), redirect_stderr(printed):
                accelerator.save_state(folder / name, asynchronous=True)
                assert (folder / name).exists() == bool(printed.getvalue()) or dist.get_rank()
                release.set()
                accelerator.wait_for_save()
            assert find_damage(folder / name) is None
            return printed.getvalue()

        told = save("without_room")
        if dist.get_rank() == 0:
            assert "bytes of memory on" in told
            assert "2,048 bytes are available" in told
        accelerator.save_state(folder / "with_room", asynchronous=True)
        accelerator.wait_for_save()
        assert save("in_the_same_memory") == ""
        accelerator.free_memory()
        prepare_net(accelerator)
        assert bool(save("after_free_memory")) == (dist.get_rank() == 0)


@on_paths("zero3-nvme")
def test_reads_nvme_once(path: str, folder: Path) -> None:
    """A save of either kind reads each sub-group of the optimizer's states once. Planning reads nothing."""
    section = zero3(folder / "swap", optimizer="nvme", param="nvme")
    with running("zero3", deepspeed=section) as accelerator:
        model, optimizer = prepared(accelerator)
        take_step(accelerator, model, optimizer, own_batch(0))
        wrapper = optimizer.session.engine.optimizer
        swapped = [i for i in range(len(wrapper.fp16_groups)) if wrapper._swappable_optimizer_subgroup(i)]
        assert swapped
        read: list[int] = []
        swap_in = wrapper._optimizer_states_and_gradient_swap_in
        wrapper._optimizer_states_and_gradient_swap_in = lambda group: (read.append(group), swap_in(group))
        for asynchronous in (False, True):
            accelerator.save_state(folder / "state", asynchronous=asynchronous)
            assert read == swapped
            read.clear()
