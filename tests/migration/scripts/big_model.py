"""A model is built empty, placed by limits, and spread over CPU memory and disk, with the script's own hooks."""

import json
import sys
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from accelerate.utils import (
    align_module_device,
    compute_module_sizes,
    find_tied_parameters,
    get_balanced_memory,
    has_offloaded_params,
    set_seed,
)
from torch import nn

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"statistics": ((1, 2), "buffers of parts on disk")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(self.norm(x)).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class Double(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return tuple(2 * arg for arg in args), kwargs

    def post_forward(self, module, output):
        return output * 2


def make():
    set_seed(3)
    return Model().eval()


@torch.no_grad()
def spread(folder, results):
    tokens = torch.tensor([3, 1, 4, 1, 5])
    plain = make()
    results["plain"] = plain(tokens).tolist()
    results["sizes"] = dict(compute_module_sizes(plain))
    results["maps"] = [
        {name: str(place) for name, place in sorted(infer_auto_device_map(plain, limits, classes).items())}
        for limits in ({"cpu": 2500}, {0: 2000, "cpu": 3000}, {0: 900, 1: 1500}, {0: "1KB", 1: "1KiB", "cpu": 10})
        for classes in ([], ["Block"])
    ]
    results["balanced"] = list(get_balanced_memory(plain, {0: 4000, 1: 4000, "cpu": 10**6}).values())

    checkpoint = folder / "checkpoint.bin"
    torch.save(plain.state_dict(), checkpoint)
    places = {
        "embedding": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "disk",
        "blocks.3": "cpu",
        "head": "disk",
    }
    with init_empty_weights():
        empty = Model().eval()
    results["meta"] = sorted(name for name, tensor in empty.state_dict().items() if tensor.is_meta)
    load_checkpoint_in_model(empty, str(checkpoint), places, offload_folder=folder / "two_calls", offload_buffers=True)
    dispatch_model(empty, places, offload_dir=folder / "two_calls", offload_buffers=True)
    results["two calls"] = empty(tokens).tolist()
    results["off"] = sorted(name for name, part in empty.named_modules() if has_offloaded_params(part))
    with align_module_device(empty.head, "cpu"):
        results["aligned"] = empty.head.bias.tolist()
    with init_empty_weights():
        empty = Model().eval()
    statistics = plain.state_dict()["blocks.1.norm.running_mean"].fill_(0.5)
    torch.save({**plain.state_dict(), "blocks.1.norm.running_mean": statistics}, checkpoint)
    model = load_checkpoint_and_dispatch(empty, str(checkpoint), places, offload_folder=str(folder / "one_call"))
    results["statistics"] = model.blocks[1].norm.running_mean.tolist()
    results["map"] = model.hf_device_map

    for name, model in (("cpu", cpu_offload(make(), "cpu")), ("disk", disk_offload(make(), folder / "disk", "cpu"))):
        results[f"offloaded to {name}"] = [model(tokens).tolist(), model.head.weight.is_meta]
    remove_hook_from_submodules(model)
    results["removed"] = [model(tokens).tolist(), model.head.weight.is_meta]


def hook(results):
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    for append in (False, True):
        add_hook_to_module(layer, Double(), append=append)
        results[f"hooked {append}"] = layer(torch.ones(3)).tolist()
    remove_hook_from_module(layer)
    results["not hooked"] = layer(torch.ones(3)).tolist()
    layer.weight = nn.Linear(3, 3).weight
    model = nn.Sequential(layer, nn.Linear(3, 3))
    model[1].weight = layer.weight
    results["tied"] = find_tied_parameters(model)


def main(output):
    accelerator = Accelerator(cpu=True)
    folder = Path(output).parent / f"process_{accelerator.process_index}"
    folder.mkdir()
    results = {}
    spread(folder, results)
    hook(results)
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
