"""Sections of DeepSpeed's configuration that count only if the model itself calls DeepSpeed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from on_paths import on_paths
from paths import (
    assert_near,
    global_batch,
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

from zero_plugin import DummyOptim

FEATURES, LAYERS = 8, 3
SECTION = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": LAYERS,
    "synchronize_checkpoint_boundary": True,
}


class _Checkpointed(nn.Module):
    """Layers that the backward recomputes, by DeepSpeed's function or not at all."""

    def __init__(self, checkpoint: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)])
        self.last = nn.Linear(FEATURES, 4)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.checkpoint(layer, x) if self.checkpoint else layer(x)
        return self.last(x)


@on_paths("zero2-one-process", "zero1", "zero2", "zero3", daily=("zero1", "zero3"))
def test_activation_checkpointing(path: str) -> None:
    """`deepspeed.checkpointing.checkpoint` uses the section, and the numbers are plain torch's."""
    plain = _Checkpointed()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    take_plain_steps(plain, sgd, range(3))
    with running(path, deepspeed={"activation_checkpointing": SECTION}) as accelerator:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        model = _Checkpointed(checkpointing.checkpoint)
        try:
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            assert checkpointing.PARTITION_ACTIVATIONS
            assert checkpointing.CONTIGUOUS_CHECKPOINTING
            assert checkpointing.num_layers == LAYERS
            for step in range(3):
                loss = loss_of(model, own_batch(step))
                assert len(checkpointing.contiguous_data_buffers) == 1, "the inputs lie in one buffer for all layers"
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
        finally:
            checkpointing.configure(None)  # DeepSpeed's switches are the whole process's


@on_paths("zero3")
def test_second_copies_of_two_models(path: str) -> None:
    """`zero_hpz_partition_size` with two models, one built partitioned, equals plain torch, and in a second run too."""
    plain, sgd = net_and_sgd()
    take_plain_steps(plain, sgd, range(2))
    for _ in range(2):
        with running(path, deepspeed={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}) as accelerator:
            with accelerator.init_model():
                built = make_net()
            for model in (built, make_net()):
                prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
                take_steps(accelerator, prepared, optimizer, range(2))
                assert_near(weights(accelerator, prepared), plain.state_dict(), 1e-5)


@on_paths("zero2-one-process", "zero1", "zero2", daily=("zero1", "zero2"))
def test_a_run_after_autocast(path: str) -> None:
    """A run without `torch_autocast` has plain torch's numbers after one with it, of the same model too."""
    for dtype in ("bfloat16", "float16"):
        net, plain = make_net(), make_net()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        loss_of(plain, global_batch(0)).backward()
        sgd.step()
        wanted = {name: value.clone() for name, value in plain.state_dict().items()}
        with running(path, deepspeed={"torch_autocast": {"enabled": True, "dtype": dtype}}) as accelerator:
            accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with running(path) as accelerator:
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            assert_near(weights(accelerator, model), wanted, 1e-6)


@on_paths("zero2-one-process", "zero0", "zero2", "zero3", daily=("zero0", "zero2"))
def test_clipping_what_muon_makes(path: str) -> None:
    """A warning is logged once, since DeepSpeed clips steps instead of gradients.

    `inf`, which only measures, logs none.
    """
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
    zero = {"zero_optimization": {"stage": int(path[-1]), "reduce_scatter": False}}
    eager = torch.compiler.set_stance("force_eager")  # DeepSpeed compiles Muon, for half a minute
    with running(path, deepspeed={**muon, **zero}) as accelerator, listening() as messages, eager:
        net = make_net()
        model, optimizer = accelerator.prepare(net, DummyOptim(net.parameters()))
        for step, limit in enumerate((float("inf"), 0.1, 0.1)):
            accelerator.backward(loss_of(model, own_batch(step)))
            accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            found = [message for message in messages if "clips Muon's updates" in message]
            assert len(found) == (path != "zero0" and step > 0 and accelerator.is_main_process)


@on_paths("zero2-one-process", "zero2")
def test_tensor_parallel_layers_lose_sums(path: str) -> None:
    """`tensor_parallel` is refused because DeepSpeed's layers sum a copy of non-contiguous tensors and drop the copy.

    A gradient of a sum or a transpose is not contiguous. The layers below would train on one process's part of it.
    """
    with running(path) as accelerator:
        model = nn.Linear(FEATURES, 4)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        from deepspeed.module_inject.layers import ColumnParallel

        own = float(accelerator.process_index + 1)
        found = []
        for gradient in (torch.full((2, 3), own), torch.full((3, 2), own).t()):
            inputs = torch.ones(2, 3, requires_grad=True)
            ColumnParallel.apply(dist.group.WORLD, inputs).backward(gradient)
            found.append(inputs.grad[0, 0].item())
        everyone = sum(range(1, accelerator.num_processes + 1))
        assert found == [everyone, own], "a release that sums both may be tried again"


@on_paths("zero2-one-process", "zero2")
def test_expert_layers_have_other_parameters(path: str) -> None:
    """`expert_parallel` is refused because DeepSpeed's layers hold this process's stacked experts under other names.

    From a model of transformers 5.23 they cannot be built at all.
    """
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import output_capturing

    with running(path):
        from deepspeed.module_inject.auto_ep import AutoEP
        from deepspeed.module_inject.auto_ep_config import AutoEPConfig

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = MixtralForCausalLM(MixtralConfig(vocab_size=8, num_hidden_layers=1, num_local_experts=4, **sizes))
        names = {name for name, _ in model.named_parameters()}
        auto = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=1))
        convert = functools.partial(auto.replace_moe_layers, auto.ep_parser(), ep_size=1, ep_rank=0)
        if hasattr(output_capturing, "_CanRecordRegistry"):
            raised(TypeError, "_CanRecordRegistry", by=convert)
        else:
            convert()
            lost = names.difference(name for name, _ in model.named_parameters())
            assert any(".experts." in name for name in lost), "a release that keeps them may be tried again"
