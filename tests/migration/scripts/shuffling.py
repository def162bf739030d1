"""The sample order of a shuffled loader, for three ways of shuffling."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"by_default": ((2,), "a shuffled loader in several processes")}


def read_twice(accelerator: Accelerator, **options: object) -> list[int]:
    """Return the numbers below 24 in the order of two epochs, all processes' steps one after another."""
    set_seed(31)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=12 // accelerator.num_processes, **options))
    return [number for _ in range(2) for batch in loader for number in accelerator.gather(batch).tolist()]


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True)
    orders = {
        "by_default": read_twice(accelerator, shuffle=True),
        "by_generator": read_twice(accelerator, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "in_order": read_twice(accelerator),
    }
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=77)
    orders["by_seedable_sampler"] = read_twice(accelerator, shuffle=True)
    assert all(sorted(order[:24]) == sorted(order[24:]) == list(range(24)) for order in orders.values())
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps(orders))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
