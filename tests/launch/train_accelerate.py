"""A script for Accelerate itself that does not know this package; prints the results as JSON."""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train six steps of eight samples. A first argument names the process group's backend."""
    handlers = [InitProcessGroupKwargs(backend=sys.argv[1])] if len(sys.argv) > 1 else []
    accelerator = Accelerator(kwargs_handlers=handlers)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8 // accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for features, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(features).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type.value == "DEEPSPEED" else None
    accelerator.print(
        json.dumps(
            {
                "processes": accelerator.num_processes,
                "kind": accelerator.distributed_type.value,
                "precision": accelerator.mixed_precision,
                "accumulation": accelerator.gradient_accumulation_steps,
                "wrapped": type(model).__name__,
                "losses": losses,
                "config": plugin and {**plugin.deepspeed_config, "steps_per_print": None},
            }
        )
    )
    # A group that ends with the last DDP wrapper waits for its thread, which may wait for the interpreter's lock.
    del model, optimizer, loss
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
