"""`prepare` plans a run's open values; the micro-batch too, if no loader gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from zero_plugin.config.document import Document
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, OptimizerFacts, Resolved
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError
from zero_plugin.plan.model_source import probe_model
from zero_plugin.plan.run_plan import plan_open_fields

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
ADAMW = OptimizerFacts("adamw", {"lr": 1e-3})
MICRO = ("train_micro_batch_size_per_gpu",)
STAGE, DEVICE = ("zero_optimization", "stage"), ("zero_optimization", "offload_optimizer", "device")
SMALL = {"reduce_bucket_size": 1_000_000}
TYPED: Mapping[str, Any] = {"zero_optimization": {"stage": 2, **SMALL}}
OPEN: Mapping[str, Any] = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}, **SMALL}}


def gpt2() -> nn.Module:
    """Build a GPT-2 of a million parameters and 128 positions."""
    config = {"n_embd": 128, "n_layer": 4, "n_head": 2, "n_positions": 128, "vocab_size": 1000}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=0, eos_token_id=0))


class OwnDecoder(nn.Module):
    """A decoder whose forward arguments cannot be guessed, with its sizes in its own config."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"n_embd": 128, "vocab_size": 1000, "block_size": 512}
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(4))
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: Any, cache: Any, positions: Any) -> Any:
        raise AssertionError("it is not called")


def asked(config: Mapping[str, Any], memory: str = "8GiB", **keys: Any) -> Document:
    launch = {"use_cpu": True, "gpu_memory": memory, "host_memory": "16GiB", "distributed_type": "DEEPSPEED"}
    return document_from_mapping({**launch, "deepspeed_config": {MICRO[0]: "auto", **config, **keys}}, "run.yaml")


def prepared(document: Document, model: nn.Module, batch: Any = None, **facts: Any) -> Resolved:
    """Return a run's resolved config, as `prepare` makes it."""
    known = Facts(machine=MachineFacts(), model=probe_model(model), **{"optimizer": ADAMW, **facts})
    known, _ = plan_open_fields(document, known, model, lambda: batch, ALONE)
    return resolve(document, known)


def micro_batch(resolved: Resolved) -> tuple[int, str]:
    entry = resolved.tree.get(*MICRO)
    assert entry is not None
    return entry.value, entry.origin.reason


def test_alone_it_is_the_largest_that_fits() -> None:
    """Its inputs follow the model's config, with the full number of positions. Less memory gives a smaller one."""
    found, reason = micro_batch(prepared(asked(TYPED), gpt2()))
    assert "by the plan the largest that fits, with " in reason
    assert "of 8 GiB on each device" in reason
    assert "of inputs from model.config, as no DataLoader shows what a sample is, 128 tokens a sample" in reason
    less, _ = micro_batch(prepared(asked(TYPED, "4GiB"), gpt2()))
    assert 1 < less < found


def test_alone_it_changes_nothing_else() -> None:
    """With typed stage and device, the plan's companion values stay DeepSpeed's defaults."""
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, **SMALL}}
    planned, typed = (prepared(asked(offload, **batch), gpt2()) for batch in ({}, {MICRO[0]: 2}))
    assert micro_batch(planned)[0] > 2
    differing = {path for path in planned.tree if planned.tree.value(*path) != typed.tree.value(*path)}
    assert differing == {MICRO, ("train_batch_size",)}
    assert set(planned.tree) == set(typed.tree)


def test_an_absent_bucket_is_counted_as_the_run_has_it() -> None:
    """It holds all parameters of a small model, though the stage is open.

    DeepSpeed's 2 GB default would fit nowhere here.
    """
    zero = {"stage": "auto", "offload_optimizer": {"device": "cpu"}}
    parameters = sum(p.numel() for p in gpt2().parameters())
    absent = prepared(asked({"zero_optimization": zero}, "2GiB"), gpt2())
    typed = prepared(asked({"zero_optimization": {**zero, "reduce_bucket_size": parameters}}, "2GiB"), gpt2())
    assert absent.tree.value("zero_optimization", "reduce_bucket_size") == parameters
    assert (absent.zero_stage, micro_batch(absent)[0]) == (typed.zero_stage, micro_batch(typed)[0])


def test_twice_is_the_same_and_leaves_the_run_alone() -> None:
    """The answer is the same each time. No random number is drawn, and no weight changes."""
    model = gpt2()
    state, weights = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = (prepared(asked(TYPED), model) for _ in range(2))
    assert first.tree == second.tree
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_chosen_with_all_else_that_is_open() -> None:
    """Stage, device and micro-batch belong to one plan. Each is logged with its reason."""
    resolved = prepared(asked(OPEN), gpt2())
    for path in (STAGE, DEVICE, MICRO):
        entry = resolved.tree.get(*path)
        assert entry is not None
        assert "by the plan" in entry.origin.reason
        assert any(line.startswith(f"{'.'.join(path)} = {entry.value}: by the plan") for line in resolved.logged)
    assert resolved.zero_stage == 0  # it has room for everything
    assert micro_batch(resolved)[0] > 1


@pytest.mark.parametrize(("steps", "expected"), [({}, (32, 2)), ({"gradient_accumulation_steps": 8}, (8, 8))])
def test_under_a_typed_global_batch(steps: dict[str, int], expected: tuple[int, int]) -> None:
    """It is the largest divisor that fits. With a typed accumulation it is their quotient."""
    model = gpt2()
    whole = prepared(asked(TYPED, train_batch_size=64, **steps), model)
    assert micro_batch(whole)[0] * whole.accumulation == 64
    # 64 samples together would take 1.3 GiB
    short = prepared(asked(TYPED, "1250MiB", train_batch_size=64, **steps), model)
    assert (micro_batch(short)[0], short.accumulation) == expected


def test_by_the_decoders_formula() -> None:
    """A module with a language model's sizes is planned by them if its forward's arguments are unknown."""
    found, reason = micro_batch(prepared(asked(TYPED), OwnDecoder()))
    assert found > 1
    assert "closed formula of a decoder, as no DataLoader shows what a sample is, 512 tokens a sample" in reason


@pytest.mark.parametrize("config", [TYPED, OPEN], ids=["typed", "open"])
def test_nothing_known(config: Mapping[str, Any]) -> None:
    """If a sample's size is unknown the micro-batch is 1, with advice."""
    found, reason = micro_batch(prepared(asked(config), nn.Linear(8, 8)))
    assert found == 1
    assert "prepare the training DataLoader, or write a number" in reason


def test_a_loader_that_hides_its_batch_size() -> None:
    """Its samples are traced, and the plan chooses how many."""
    found, reason = micro_batch(prepared(asked(TYPED), nn.Linear(256, 256), torch.zeros(8, 256)))
    assert found > 1
    assert "(activations: traced at micro-batches 2 and 3)" in reason


def test_a_loader_tells() -> None:
    """The loader's value is used alone: no batch is read and no plan made."""
    document, loop = asked(TYPED), LoopFacts(4, "the training DataLoader's batch_size")
    facts = Facts(loop, MachineFacts(), optimizer=ADAMW)
    known, activations = plan_open_fields(document, facts, gpt2(), lambda: pytest.fail("looked at a batch"), ALONE)
    assert known is facts
    assert activations is None
    assert micro_batch(resolve(document, known)) == (4, loop.micro_batch_reason)


@pytest.mark.parametrize("facts", [{"strategy": "ddp"}, {"strategy": "single"}, {"optimizer": None}], ids=str)
def test_where_no_number_needs_it(facts: dict[str, Any]) -> None:
    """Without DeepSpeed, and for an untrained model, it is only logged, and costs no trace."""
    known = Facts(machine=MachineFacts(), **{"optimizer": ADAMW, **facts})
    model = gpt2()
    assert plan_open_fields(asked(TYPED), known, model, lambda: pytest.fail("looked at a batch"), ALONE)[0] is known


def test_where_nothing_fits() -> None:
    """A micro-batch that alone is open stops no run, since its samples are assumed. An open stage does."""
    found, reason = micro_batch(prepared(asked(TYPED, "700MiB"), gpt2()))
    assert found == 1
    assert "as without a plan: nothing fits: stage 2 needs " in reason
    assert "Any one of these changes is enough: " in reason
    with pytest.raises(ConfigError, match=r"nothing fits: .*128 tokens a sample"):
        prepared(asked(OPEN, "700MiB"), gpt2())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = rows + self.mlp(rows)
        return added


def test_what_the_model_of_a_run_could_save() -> None:
    """If activations do not fit, the error names MLPs in chunks and checkpoints in CPU memory.

    For the micro-batch alone the traces cost too much.
    """
    model, batch = nn.Sequential(nn.Sequential(*(Residual() for _ in range(6)))), torch.zeros(1, 2**16, 16)
    with pytest.raises(ConfigError) as raised:
        prepared(asked(OPEN, "2GiB"), model, batch)
    fix = raised.value.problems[0].fix
    assert "; chunk_layer(block.mlp, 4) of zero_plugin.long_context for every block" in fix
    assert "activation checkpointing under torch.autograd.graph.save_on_cpu(pin_memory=True), with " in fix
    _, reason = micro_batch(prepared(asked(TYPED, "2GiB"), model, batch))
    assert "chunk_layer" not in reason
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_loader_that_comes_later_wins() -> None:
    """Its batch size is settled again, and a log line says that the plan was for another number."""
    document, model = asked(TYPED), gpt2()
    facts = Facts(machine=MachineFacts(), model=probe_model(model), optimizer=ADAMW)
    planned, _ = plan_open_fields(document, facts, model, lambda: None, ALONE)
    loop = LoopFacts(3, "the training DataLoader's batch_size")
    joined = resolve(document, Facts(loop, facts.machine, facts.model, ADAMW, planned=planned.planned))
    assert micro_batch(joined) == (3, loop.micro_batch_reason)
    assert any("samples per process; the loop trains on 3" in line for line in joined.logged)
