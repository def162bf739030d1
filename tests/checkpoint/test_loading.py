"""Weights that are read straight into models: their values, misfits, and the training after the load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from offloading import files_of
from on_paths import ALL, in_processes, on_paths
from paths import assert_near, global_batch, loss_of, own_batch, raised, running, same, weights
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_plugin import init_empty_weights
from zero_plugin.errors import CheckpointError

SWAP = {"stage": 3, "stage3_param_persistence_threshold": 0}


class Net(nn.Module):
    """A model with odd sizes, tied and frozen weights, several layer kinds and buffers: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 33)
        self.norm = nn.LayerNorm(33)
        self.one = nn.Linear(33, 33, bias=False)
        self.two = nn.Linear(33, 33, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(33, 4)
        self.register_buffer("shift", torch.full((33,), 0.5))
        self.register_buffer("table", torch.linspace(0, 1, 33), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x))) + self.shift.to(x.dtype) * self.table.to(x.dtype)
        return self.last(self.gain * torch.tanh(self.frozen(self.two(torch.tanh(self.one(x))))))


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a state dict of `Net` with values that no constructor makes. The tied weight has its second name only."""
    torch.manual_seed(seed)
    state = {name: (torch.randn_like(tensor) / 4).to(dtype) for name, tensor in Net().state_dict().items()}
    del state["one.weight"]
    return state


def stored(state: dict[str, Tensor], folder: Path, *, shards: int = 1) -> Path:
    """Write that state into a folder, as one file or several with an index. Process 0 writes."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(state)
        if shards == 1:
            save_file(state, folder / "model.safetensors")
        else:
            files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
            for file in set(files.values()):
                save_file({name: state[name] for name in names if files[name] == file}, folder / file)
            index = {"metadata": {}, "weight_map": files}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    return folder


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `state_dict` of a model with those values."""
    return {**state, "one.weight": state["two.weight"]}


def plain(state: dict[str, Tensor]) -> Net:
    """Return the model that plain torch loads."""
    net = Net()
    net.load_state_dict(whole(state))
    return net


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, steps: range, batch: Callable[[int], Any], backward: Callable[..., None]) -> None:
    for step in steps:
        backward(loss_of(model, batch(step)))
        optimizer.step()
        optimizer.zero_grad()


@on_paths(*ALL, daily=("single", "ddp", "zero2", "zero3", "zero3-cpu"))
def test_values_and_training(folder: Path, path: str) -> None:
    """A model made in `init_model(weights=…)` has the files' values on every process and trains as in plain torch.

    Training continues from weights that are loaded between steps.
    """
    first, second = values(11), values(12)
    reference = plain(first)
    optimizer = sgd(reference)
    train(reference, optimizer, range(2), global_batch, Tensor.backward)
    after_two = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(whole(second))
    train(reference, optimizer, range(2, 4), global_batch, Tensor.backward)

    with running(path) as accelerator:
        with accelerator.init_model(weights=stored(first, folder / "first", shards=3)) as reports:
            net = Net()
            assert all(p.is_meta for p in net.parameters())
        assert net.two.weight is net.one.weight
        assert not net.frozen.weight.requires_grad
        assert torch.equal(net.table, Net().table)
        [report] = reports
        assert report.is_complete
        assert sorted(report.loaded) == sorted(set(whole(first)) - {"two.weight"})
        model, optimizer = accelerator.prepare(net, sgd(net))
        assert same(weights(accelerator, model), whole(first))
        train(model, optimizer, range(2), own_batch, accelerator.backward)
        assert_near(weights(accelerator, model), after_two)
        accelerator.load_weights(model, stored(second, folder / "second") / "model.safetensors")
        assert same(weights(accelerator, model), whole(second))
        train(model, optimizer, range(2, 4), own_batch, accelerator.backward)
        assert_near(weights(accelerator, model), reference.state_dict())


@on_paths("single", "ddp", "zero1", "zero3", "zero3-cpu", daily=("ddp", "zero3", "zero3-cpu"))
def test_plain_models(folder: Path, path: str) -> None:
    """Unprepared models get the values too: initialised, partly or fully, or on the meta device."""
    state = values(13)
    place = stored(state, folder / "model")
    with running(path) as accelerator:
        with accelerator.init_model():
            built = Net()
        with init_empty_weights():
            empty = Net()
        for net in (built, empty, Net()):
            accelerator.load_weights(net, place)
            model = accelerator.prepare(net)
            assert same(weights(accelerator, model), whole(state))


@in_processes(2)
def test_types(folder: Path) -> None:
    """Values are converted once: fp32 files into bf16 weights with exact fp32 masters, and bf16 files into fp32."""
    from deepspeed.utils import safe_get_full_fp32_param

    state, halves = values(14), values(14, torch.bfloat16)
    fp32, bf16 = stored(state, folder / "fp32"), stored(halves, folder / "bf16")
    for path in ("zero1", "zero3"):
        with running(path, mixed_precision="bf16") as accelerator:
            with accelerator.init_model(weights=fp32):
                net = Net()
            model, optimizer = accelerator.prepare(net, sgd(net))
            rounded = {name: tensor.bfloat16() for name, tensor in whole(state).items()}
            rounded["shift"] = state["shift"]
            assert same(weights(accelerator, model), rounded)
            train(model, optimizer, range(1), own_batch, accelerator.backward)
            accelerator.load_weights(model, fp32)
            assert same(weights(accelerator, model), rounded)
            for name, p in net.named_parameters():
                if p.requires_grad:
                    assert torch.equal(safe_get_full_fp32_param(p), whole(state)[name]), name
    with running("zero3") as accelerator:
        with accelerator.init_model(weights=bf16):
            net = Net()
        widened = {name: tensor.float() for name, tensor in whole(halves).items()}
        assert same(weights(accelerator, accelerator.prepare(net)), widened)


@in_processes(2)
def test_weights_that_stay_whole(folder: Path) -> None:
    """Small parameters that stage 3 keeps unpartitioned between steps have the new values."""
    state = values(18)
    x = global_batch(0)[0]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 500}
    with running("zero3", deepspeed={"zero_optimization": zero}) as accelerator:
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        train(model, optimizer, range(1), own_batch, accelerator.backward)
        assert net.first.weight.numel() == 8 * 33
        assert net.one.weight.numel() == 0
        accelerator.load_weights(model, stored(state, folder / "model"))
        assert torch.allclose(model(x), plain(state)(x), atol=1e-6)


def unfitting(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Return values and a folder with one missing, one surplus, and one misshapen parameter."""
    state = values(15)
    shown = {**state, "extra": torch.ones(3), "last.bias": torch.ones(5)}
    del shown["first.weight"], shown["gain"]
    return state, stored(shown, folder / "unfitting")


@on_paths("single", "zero1", "zero3")
def test_strictness(folder: Path, path: str) -> None:
    """All misfits are named together on every process, and no weight is written."""
    state, place = unfitting(folder)
    words = (
        "2 not in the file: gain, first.weight",
        "1 not in the model: extra",
        "last.bias ([4] here, [5] in the file)",
    )
    with running(path) as accelerator:
        net = Net()
        accelerator.load_weights(net, stored(values(16), folder / "before"))
        raised(CheckpointError, *words, "strict=False", by=lambda: accelerator.load_weights(net, place))
        model, _ = accelerator.prepare(net, sgd(net))
        raised(CheckpointError, *words, by=lambda: accelerator.load_weights(model, place))
        assert same(weights(accelerator, model), whole(values(16)))
        report = accelerator.load_weights(model, place, strict=False)
        assert (report.missing, report.unexpected, report.initialized) == (["gain", "first.weight"], ["extra"], [])
        assert report.mismatched == {"last.bias": "[4] here, [5] in the file"}
        kept = {name: whole(values(16))[name] for name in ("first.weight", "gain", "last.bias")}
        assert same(weights(accelerator, model), {**whole(state), **kept})
        raised(CheckpointError, "nowhere", by=lambda: accelerator.load_weights(model, folder / "nowhere"))


@on_paths("single", "ddp", "zero3")
def test_initialising(folder: Path, path: str) -> None:
    """Missing weights are initialised by their own layer, and no others change. Impossible ones are reported."""
    state = values(17)
    shown = {name: state[name] for name in state if name not in ("first.weight", "frozen.bias", "norm.weight")}
    place = stored(shown, folder / "some")
    with running(path) as accelerator:
        with accelerator.init_model(weights=place, strict=False) as reports:
            net = Net()
        missing = ["first.weight", "frozen.bias", "norm.weight"]
        assert sorted(reports[0].initialized) == sorted(reports[0].missing) == missing
        found = weights(accelerator, accelerator.prepare(net))
        assert same({name: found[name] for name in shown}, shown)
        assert torch.equal(found["norm.weight"], torch.ones(33))
        for name, bound in (("first.weight", 8**-0.5), ("frozen.bias", 33**-0.5)):  # torch's own for a Linear
            assert 0.5 * bound < found[name].abs().max() <= bound, name

        raised(CheckpointError, "gain: not in the file", "reset_parameters", by=lambda: load_empty(accelerator, folder))


def load_empty(accelerator: Any, folder: Path) -> None:
    shown = {name: tensor for name, tensor in values(17).items() if name != "gain"}
    with accelerator.init_model(weights=stored(shown, folder / "gainless"), strict=False):
        net = Net()
    del net


@in_processes(2)
def test_never_whole(folder: Path) -> None:
    """No process's memory grows by more than its partition and a tenth. The complete model would be twice that."""
    layers, width = 16, 1024
    state = {f"{i}.weight": torch.full((width, width), float(i)) for i in range(layers)}
    place = stored(state, folder / "large")
    small = stored({"weight": torch.ones(8, 8)}, folder / "small")
    partition = layers * width * width * 4 // dist.get_world_size()
    del state
    with running("zero3") as accelerator:
        with accelerator.init_model(weights=small):  # for one-time costs: imports, the process group's buffers
            model = nn.Linear(8, 8, bias=False)
        with growth() as peak, accelerator.init_model(weights=place):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for number, layer in enumerate(model):
            assert bool((layer.weight.ds_tensor == number).all())
    assert 0.9 * partition < peak[0] < 1.1 * partition, (peak[0], partition)


@contextmanager
def growth() -> Iterator[list[int]]:
    """Measure the peak growth of this process's anonymous memory inside the block, in bytes."""
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        peak[0] = max(peak[0], anonymous_bytes() - before)
        ended.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return this process's resident bytes that do not belong to a file."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def swapping(swap: Path) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    return {**SWAP, "offload_param": {**nvme, "max_in_cpu": 0, "buffer_size": 2_000_000, "buffer_count": 6}}


def large(seed: int) -> nn.Sequential:
    """Return weights of 4 MB, which are swapped on one and on two processes, and biases, which are not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Linear(1024, 4))


@in_processes(1, 2)
def test_nvme(folder: Path) -> None:
    """Partitions on NVMe are written straight from the file, before `prepare` and in an engine, and they train."""
    first, second = large(21).state_dict(), large(22).state_dict()
    places = [stored(state, folder / name) for name, state in (("first", first), ("second", second))]
    zero = {"zero_optimization": {**swapping(folder / "swap"), "offload_optimizer": {"device": "cpu"}}}
    reference = large(21)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), range(1), global_batch, Tensor.backward)
    share = 1024 * 1024 // dist.get_world_size()
    with running("zero3", deepspeed=zero) as accelerator:
        with accelerator.init_model(weights=places[0]):
            net = large(0)
        found = files_of(folder / "swap")
        assert found == {"float32params": share * 4}, found
        [file] = (folder / "swap").rglob(f"rank{dist.get_rank()}/*")
        swapped = torch.from_file(str(file), shared=False, size=share, dtype=torch.float32)
        assert torch.equal(swapped, first["2.weight"].flatten().chunk(dist.get_world_size())[dist.get_rank()])
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        assert net[2].weight.ds_tensor.numel() < 2
        assert same(weights(accelerator, model), first)
        train(model, optimizer, range(1), own_batch, accelerator.backward)
        assert_near(weights(accelerator, model), reference.state_dict())
        accelerator.load_weights(model, places[1])
        assert same(weights(accelerator, model), second)
        train(model, optimizer, range(1), own_batch, accelerator.backward)
        assert not same(weights(accelerator, model), second)
    with running("zero3", deepspeed={"zero_optimization": swapping(folder / "swap")}) as accelerator:
        with accelerator.init_model():
            net = large(0)
        accelerator.load_weights(net, places[0])
        model = accelerator.prepare(net)
        assert same(weights(accelerator, model), first)
        accelerator.load_weights(model, places[1])
        assert same(weights(accelerator, model), second)


@in_processes(2)
def test_pretrained(folder: Path) -> None:
    """transformers' folders load: one file, shards, by class, by configuration, tied weights, base with a head."""
    from small import bert, build, gpt2
    from transformers import AutoModelForCausalLM, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=64)
    torch.manual_seed(1)
    models = {"gpt2": build(gpt2), "bert": build(bert), "llama": LlamaForCausalLM(llama)}
    if dist.get_rank() == 0:
        for name, model in models.items():
            model.save_pretrained(folder / name, max_shard_size="20KB" if name == "gpt2" else "1GB")
        models["bert"].base_model.save_pretrained(folder / "base")
    dist.barrier()
    assert len(list((folder / "gpt2").glob("*.safetensors"))) > 2
    with running("zero3") as accelerator:
        for name, wanted in models.items():
            with accelerator.init_model(weights=folder / name):
                model = AutoModelForCausalLM.from_config(llama) if name == "llama" else type(wanted)(wanted.config)
            assert all(hasattr(p, "ds_id") for p in model.parameters())
            assert same(weights(accelerator, accelerator.prepare(model)), wanted.state_dict())
            assert same(dict(model.named_buffers()), dict(wanted.named_buffers()))
        config = models["bert"].config
        with accelerator.init_model(weights=folder / "base", strict=False) as reports:
            headed = BertForMaskedLM(config)
        assert all(name.startswith("cls.") for name in reports[0].missing)
        assert reports[0].initialized == reports[0].missing
        found = weights(accelerator, accelerator.prepare(headed))
        wanted = models["bert"].state_dict()
        assert same(*({n: t for n, t in state.items() if n.startswith("bert.")} for state in (found, wanted)))
        dense = found["cls.predictions.transform.dense.weight"]
        assert 0.015 < dense.std() < 0.025  # the configuration's initializer_range
        assert torch.equal(found["cls.predictions.transform.LayerNorm.weight"], torch.ones(32))
        with accelerator.init_model(weights=folder / "bert", strict=False) as reports:
            base = BertModel(config, add_pooling_layer=False)
        assert reports[0].missing == []
        assert all(name.startswith("cls.") for name in reports[0].unexpected)
        wanted = models["bert"].base_model.state_dict()
        assert same(weights(accelerator, accelerator.prepare(base)), wanted)
        with (
            patch.object(BertModel, "_keys_to_ignore_on_load_unexpected", [r"^cls\."]),
            accelerator.init_model(weights=folder / "bert", strict=False) as reports,
        ):
            base = BertModel(config, add_pooling_layer=False)
            assert base.config is config
        assert reports[0].unexpected == []  # the class says that the model may lack it
        raised(
            CheckpointError,
            "GPT2LMHeadModel.from_pretrained(",
            by=lambda: accelerator.load_weights(models["gpt2"], folder / "llama"),
        )
        assert not any(hasattr(p, "ds_id") for p in models["gpt2"].parameters())
