"""`stage: auto`, as in ds_configs/auto.yaml: stated memory forces every choice, and the chosen setup trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from on_paths import in_processes
from paths import listening, raised, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, DummyOptim, DummyScheduler
from zero_plugin.distributed.collectives import gather_object
from zero_plugin.errors import ConfigError
from zero_plugin.plan.activations import trace_activations
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.model_source import model_sizes
from zero_plugin.plan.search import Choice, Wanted, plan
from zero_plugin.plan.situation import Workload, optimizer_sizes

AUTO: Mapping[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "ds_configs" / "auto.yaml").read_text())
MICRO = "train_micro_batch_size_per_gpu"
MARGIN = 0.1
ROOM = 64 * 2**30
WORLD = 2
# No buffers and gathered weights of fixed size. For a small model they would outweigh what the stages divide.
SMALL = {
    "reduce_bucket_size": 1_000_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "overlap_comm": False,
}
LITTLE = 2300 * 2**20  # of CPU memory: enough for two processes without offload
WAYS = ((1, "none", "none"), (2, "none", "none"), (3, "none", "none"), (3, "cpu", "cpu"))


def make_model() -> nn.Module:
    """Build ten million parameters, enough to show next to the gigabyte that any process takes."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(10)], nn.Linear(1024, 4))


def plan_with_room(world: int) -> Choice:
    """Return the memory that every option needs, by the same arithmetic."""
    model = make_model()
    activations = trace_activations(model, [torch.ones(4, 1024)], "no")
    cluster = state_cluster(gpu_memory=ROOM, host_memory=ROOM, gpus=world)
    wanted = Wanted(
        ddp=False,
        precision="no",
        micro_batch=4,
        accumulation=2,
        activation_checkpointing=False,
        reduce_bucket=SMALL["reduce_bucket_size"],
        prefetch_bucket=0,
        persistence_threshold=0,
        max_reuse_distance=0,
        overlap_comm=False,
        pin_memory=False,
    )
    optimizer = optimizer_sizes("adamw")
    return plan(Workload(model_sizes(model), activations, optimizer), cluster, wanted)


def prepare(world: int, memory: int, host: int = ROOM, **zero: Any) -> tuple[Accelerator, list[Any]]:
    """Prepare the model under auto.yaml with stated memory."""
    training = AUTO["deepspeed_config"]
    training = {**training, "zero_optimization": {**training["zero_optimization"], **SMALL, **zero}}
    training["gradient_accumulation_steps"] = 2
    stated = {"num_processes": world, "mixed_precision": "no", "use_cpu": True}
    stated |= {"gpu_memory": memory, "host_memory": f"{host // 2**20}MiB"}
    accelerator = Accelerator(config={**AUTO, **stated, "deepspeed_config": training})
    model = make_model()
    data = TensorDataset(torch.randn(24 * world, 1024), torch.randn(24 * world, 4))
    optimizer = DummyOptim(model.parameters(), lr=1e-3)
    scheduler = DummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=1)
    loader = DataLoader(data, batch_size=4)
    try:
        return accelerator, list(accelerator.prepare(model, optimizer, loader, scheduler))
    except ConfigError:
        accelerator.end_training()
        raise


@in_processes(2)
@pytest.mark.parametrize(
    ("stage", "optimizer", "params"),
    [way if way == WAYS[-1] else pytest.param(*way, marks=pytest.mark.campaign) for way in WAYS],
)
def test_memory_forces_every_choice(stage: int, optimizer: str, params: str) -> None:
    """If memory suffices for exactly one option, the plan chooses it among all that auto.yaml leaves open.

    It trains.
    """
    way = (stage, optimizer, params)
    (found,) = (
        candidate.footprint
        for candidate in plan_with_room(WORLD).table
        if candidate.setup.ratio == 1.0
        and way == (candidate.setup.stage, candidate.setup.offload_optimizer, candidate.setup.offload_param)
    )
    just = int(found.device_bytes / (1 - MARGIN)) + 2**16
    beside = LITTLE if optimizer == "none" else int(found.host_bytes / (1 - MARGIN)) + 2**22
    accelerator, (model, stepping, loader, scheduler) = prepare(WORLD, just, beside)
    resolved = accelerator.resolved
    assert resolved is not None
    assert (resolved.zero_stage, resolved.offload_device("optimizer"), resolved.offload_device("param")) == way
    assert accelerator._run.strategy.partitions_parameters is (stage == 3)
    assert "auto" not in str(resolved.deepspeed_config()["zero_optimization"])
    for key in ("stage", "offload_optimizer.device", "offload_param.device"):
        entry = resolved.tree.get("zero_optimization", *key.split("."))
        assert entry is not None
        assert "by the plan" in entry.origin.reason
    before = weights(accelerator, model)["10.weight"]
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            stepping.step()
            scheduler.step()
            stepping.zero_grad()
    assert not torch.equal(weights(accelerator, model)["10.weight"], before)
    accelerator.end_training()


@in_processes(2)
def test_what_fits_nowhere_is_refused(folder: Path) -> None:
    """Every process raises the same error, which names the shortage and possible fixes."""
    words = ("nothing fits", "on the device", "Any one of these changes is enough")
    raised(ConfigError, *words, by=lambda: prepare(WORLD, 1100 * 2**20, LITTLE))


@in_processes(2)
def test_a_model_built_before_the_plan_is_said_to_be_whole(folder: Path) -> None:
    """init_model cannot know a stage that prepare chooses. The message says what would settle the stage earlier."""
    accelerator = Accelerator(config={**AUTO, "num_processes": WORLD, "mixed_precision": "no", "use_cpu": True})
    with listening() as said, accelerator.init_model():
        model = nn.Linear(4, 4)
    assert model.weight.shape == (4, 4)
    assert accelerator.process_index or any("launch --model" in line for line in said)
    accelerator.end_training()


@in_processes(2)
def test_without_a_loader_the_micro_batch_is_planned(folder: Path) -> None:
    """Every process gets the planned value and its reason. A later loader is compared with the plan's assumptions."""
    import transformers

    stated = {"num_processes": WORLD, "mixed_precision": "no", "use_cpu": True, "gpu_memory": ROOM, "host_memory": ROOM}
    accelerator = Accelerator(config={**AUTO, **stated})
    with listening() as said:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=100)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = DummyOptim(model.parameters(), lr=1e-3)
        schedule = DummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=1)
        model, optimizer, _ = accelerator.prepare(model, optimizer, schedule)
        assert accelerator.resolved is not None
        found = [accelerator.resolved.tree.entries[key] for key in (("zero_optimization", "stage"), (MICRO,))]
        assert all("64 tokens a sample" in entry.origin.reason for entry in found)
        stage, micro = (entry.value for entry in found)
        assert micro > 1
        assert gather_object([(stage, micro, accelerator.resolved.accumulation)]) == [(stage, micro, 1)] * WORLD
        planned = f"{MICRO} = {micro}: by the plan the largest that fits"
        assert accelerator.process_index or any(line.startswith(planned) for line in said)
        ids = torch.ones(2, 64, dtype=torch.long)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.prepare(DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=2, shuffle=True))
        assert accelerator.resolved.tree.value(MICRO) == 2
        differs = f"the plan was made for {micro} samples per process; the loop trains on 2"
        assert accelerator.process_index or any(differs in line for line in said)
    accelerator.end_training()


@in_processes(2)
def test_what_is_typed_stays(folder: Path) -> None:
    """The plan chooses around a typed stage."""
    accelerator, _ = prepare(WORLD, ROOM, stage=2)
    assert accelerator.resolved is not None
    assert accelerator.resolved.zero_stage == 2
    accelerator.end_training()
