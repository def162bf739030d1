"""After `free_memory`, a model has no traces of a training and trains again as in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, ENGINE, on_paths
from paths import (
    assert_near,
    listening,
    loss_of,
    make_net,
    net_and_sgd,
    own_batch,
    raised,
    running,
    take_plain_steps,
    take_steps,
    weights,
)
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.errors import LoopError

_DROPPED = "free_memory() drops the gradients of {} of the Sequential"
# Attributes that an engine leaves, and why. At stage 3, those that begin with `ds_` are left too, since the weights
# stay partitioned.
_LEFT = {
    "_dp_group": "the process group, which outlives engines; a new engine sets it again",
    "_index_in_param_group": "a number; a new engine sets it again",
    "param_idx_in_group": "a number; a new engine sets it again",
    "get_full_hp_param": "methods of DeepSpeed that belong to the parameter, and hold no other object",
    "get_full_hp_grad": "as above",
    "set_full_hp_param": "as above",
    "set_full_hp_grad": "as above",
    "load_hp_checkpoint_state": "as above",
    "_external_params": "a script may have registered some itself, by deepspeed.zero.register_external_parameter",
    "all_parameters": "belongs to `_external_params`",
    "is_external_param": "belongs to `_external_params`",
    "__deepcopy__": "the error that says why a partitioned model cannot be copied",
    "aligned_size": "methods of a partitioned parameter",
    "all_gather": "as above",
    "all_gather_coalesced": "as above",
    "convert_to_zero_parameters": "as above",
    "item": "as above",
    "nvme_swapper": "as above",
    "padding_size": "as above",
    "partition": "as above",
    "partition_gradients": "as above",
    "partition_numel": "as above",
    "reduce_gradients_at_owner": "as above",
}
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_nothing_of_a_training_is_left_in_a_model(path: str) -> None:
    """No hook, gradient, optimizer or counter remains, even with an open window.

    The attributes equal the original ones.
    """
    with running(path) as accelerator:
        net = make_net()
        before = dict(_attributes(net))
        for count in (1, 2):
            _train(accelerator, net, range(3), steps=2)
            accelerator.free_memory()
            left = {at: what for at, what in _attributes(net) if before.get(at) != what}
            new = {at for at in left if not _is_expected(at[1])}
            gone = {at for at in before if at not in dict(_attributes(net))}
            assert not new, (count, {at: left[at] for at in new})
            assert not gone, (count, gone)
            hooks = [len(getattr(part, name)) for part in net.modules() for name in _HOOKS if getattr(part, name)]
            # Of a partitioned module: the hook that refuses a forward for which no engine gathers weights.
            assert hooks == [1] * (len(list(net.modules())) if path.startswith("zero3") else 0)


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_an_open_window_is_dropped(path: str) -> None:
    """At any point of the loop, no gradient remains and one line counts the backwards.

    The next training starts fresh.
    """
    plain = _plain(range(4))
    for begin, count in (
        (_accumulate, "2 backwards"),
        (_clip, "1 backward"),
        (_fail, "1 backward"),
        (_do_not_step, "1 backward"),
    ):
        with running(path) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, _sgd(net))
            with listening() as messages:
                begin(accelerator, model, optimizer)
                accelerator.free_memory()
            said = [message for message in messages if _DROPPED.format(count) in message]
            assert len(said) == (dist.get_rank() == 0), (begin.__name__, messages)
            assert all(p.grad is None for p in net.parameters())
            del model, optimizer
            accelerator.gradient_accumulation_steps = 1
            model = _train(accelerator, net, range(4), steps=4)
            assert_near(weights(accelerator, model), plain)
            with listening() as messages:
                accelerator.free_memory()
            assert not [message for message in messages if "drops the gradients" in message]


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_what_the_script_keeps_of_the_old_training_changes_nothing(path: str) -> None:
    """Its model, optimizer and loss change nothing, as when names are bound again only once `prepare` returns."""
    plain = _plain(range(4))
    with running(path) as accelerator:
        net = make_net()
        kept: list[Any] = []
        for steps in (range(2), range(2, 4)):
            model, optimizer = accelerator.prepare(net, _sgd(net))
            for step in steps:
                loss = loss_of(model, own_batch(step))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            kept += [model, optimizer, loss]
            state = weights(accelerator, model)
            accelerator.free_memory()
        assert_near(state, plain)
        for old in kept[1::3]:
            raised(LoopError, "has ended", by=old.step)


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_a_model_trains_again_after_a_failed_forward(path: str) -> None:
    """It trains again after a failure on every process in mid-forward, with and without an open window before."""
    plain = _plain(range(4))
    for has_open_window in (False, True):
        with running(path) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, _sgd(net))
            if has_open_window:
                accelerator.backward(loss_of(model, own_batch(9)))
            hook = net[2].register_forward_pre_hook(_raise)
            raised(ArithmeticError, by=lambda model=model: model(own_batch(0)[0]))
            hook.remove()
            accelerator.free_memory()
            del model, optimizer
            model = _train(accelerator, net, range(4), steps=4)
            assert_near(weights(accelerator, model), plain)


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_layers_are_frozen_and_unfrozen_over_open_windows(path: str) -> None:
    """In each training another layer is frozen, with another optimizer: the weights are plain torch's."""
    plain = make_net()
    for number, frozen in enumerate((None, 0, 2, 0)):
        _freeze(plain, frozen)
        optimizer = _other(number, plain)
        take_plain_steps(plain, optimizer, range(3))
    with running(path) as accelerator:
        net = make_net()
        for number, frozen in enumerate((None, 0, 2, 0)):
            _freeze(net, frozen)
            model = _train(accelerator, net, range(5), steps=3, optimizer=_other(number, net))
            state = weights(accelerator, model)
            del model
            accelerator.free_memory()
        assert_near(state, plain.state_dict())


def _train(accelerator: Accelerator, net: nn.Module, batches: range, *, steps: int, optimizer: Any = None) -> nn.Module:
    """Train with a step after each of the first backwards, and none after the others."""
    model, optimizer = accelerator.prepare(net, _sgd(net) if optimizer is None else optimizer)
    for number, batch in enumerate(batches):
        accelerator.gradient_accumulation_steps = 1 if number < steps else 9
        accelerator.backward(loss_of(model, own_batch(batch)))
        if number < steps:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    return model


def _plain(batches: range) -> dict[str, Tensor]:
    net = make_net()
    optimizer = _sgd(net)
    take_plain_steps(net, optimizer, batches)
    return net.state_dict()


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def _other(number: int, net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-4) if number % 2 else torch.optim.SGD(trained, lr=0.1)


def _freeze(net: Any, layer: int | None) -> None:
    net.requires_grad_(True)
    if layer is not None:
        net[layer].requires_grad_(False)


def _accumulate(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.gradient_accumulation_steps = 3
    for step in range(2):
        with accelerator.accumulate(model):
            take_steps(accelerator, model, optimizer, [step])


def _clip(accelerator: Accelerator, model: nn.Module, _: Any) -> None:
    accelerator.backward(loss_of(model, own_batch(0)))
    accelerator.clip_grad_norm_(model.parameters(), 0.1)


def _fail(accelerator: Accelerator, model: nn.Module, _: Any) -> None:
    x, y = own_batch(0)
    out = model(x)
    out.register_hook(_raise)
    # Gradients of some parameters, not of all.
    raised(ArithmeticError, by=lambda: accelerator.backward((out - y).square().mean()))


def _do_not_step(accelerator: Accelerator, model: nn.Module, _: Any) -> None:
    accelerator.backward(loss_of(model, own_batch(0)))


def _raise(*_: Any) -> None:
    raise ArithmeticError("the script's own")


def _is_expected(name: str) -> bool:
    return name in _LEFT or name.startswith("ds_")


def _attributes(net: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """List each attribute of each submodule and parameter: its owner, name and type."""
    owners: list[tuple[str, Any]] = [*net.named_modules(), *net.named_parameters()]
    for where, owner in owners:
        for name, value in vars(owner).items():
            yield (where, name), type(value)
    for where, p in net.named_parameters():
        yield (where, "grad"), None if p.grad is None else p.grad.shape
        hooks = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        yield (where, "hooks"), [len(of or ()) for of in hooks]


@on_paths(*ALL, daily=("single", "zero1", "zero3"))
def test_an_optimizer_is_prepared_again(path: str) -> None:
    """If its states are still its own, it trains. If ZeRO partitioned them, an error asks for a new one."""
    with running(path) as accelerator:
        net, sgd = net_and_sgd(momentum=0.9)
        for _ in range(2):
            model, optimizer = accelerator.prepare(net, sgd)
            take_steps(accelerator, model, optimizer, [0])
            accelerator.free_memory()
            if path.startswith("zero") and path != "zero0":
                raised(LoopError, "Build a new optimizer", by=lambda: accelerator.prepare(net, sgd))
                return


@on_paths(*ENGINE, daily=("zero2", "zero3"))
def test_a_loss_from_before(path: str) -> None:
    """Its backward raises an error that names what has ended, and the next training is right."""
    with running(path) as accelerator:
        net = make_net()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = loss_of(model, own_batch(0))
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        raised(LoopError, "before free_memory()", by=lambda: accelerator.backward(loss))
        optimizer.zero_grad()


@on_paths("zero3")
def test_a_model_of_processes_that_have_ended(path: str) -> None:
    """Its partitions belong to a group that is gone, as after `end_training`. An error says to build it again."""
    with running(path) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.free_memory()
        group = dist.new_group()
        for p in net.parameters():
            p.ds_process_group = group
        dist.destroy_process_group(group)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        raised(LoopError, "Build the model again", by=lambda: accelerator.prepare(net, sgd))
