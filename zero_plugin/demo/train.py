"""Trains a byte-level GPT on Python's own library: an ordinary loop, run on whatever the launch config says."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from zero_plugin import Accelerator, set_seed
from zero_plugin.demo.gpt import GPT, GPTConfig, generate, next_byte_loss
from zero_plugin.demo.picture import save_curves
from zero_plugin.demo.text import Blocks, read_text
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.progress import Progress

Batch = tuple[Tensor, Tensor]


def main() -> None:
    """Train, measure on held-out text, write a sample, and save curves and weights."""
    args = read_arguments()
    accelerator = Accelerator()
    set_seed(args.seed)

    train_text, held_out_text = read_text()
    loader = DataLoader(Blocks(train_text, args.block), args.batch_size, shuffle=True, drop_last=True)
    held_out = DataLoader(Blocks(held_out_text, args.block), args.batch_size)

    config = GPTConfig(hidden_size=args.width, layers=args.layers, heads=args.heads, block=args.block)
    model = GPT(config)
    parameters = sum(p.numel() for p in model.parameters())
    accelerator.print(
        f"{parameters:,} parameters, {len(train_text):,} bytes of text, "
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}"
    )

    updates = args.steps // accelerator.gradient_accumulation_steps
    if not updates:
        message = f"{args.steps} batches make no optimizer step of {accelerator.gradient_accumulation_steps} batches"
        raise ConfigError([Problem("--steps", "", message, "Give more steps, or accumulate fewer batches.")])
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    total = updates * accelerator.num_processes  # a prepared schedule advances once per process and optimizer step
    scheduler = OneCycleLR(optimizer, args.lr, total, pct_start=0.1, anneal_strategy="linear", cycle_momentum=False)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    losses = torch.zeros(args.steps, device=accelerator.device)
    rates: list[float] = []
    model.train()
    with Progress(total=args.steps) as progress:
        for step, (ids, targets) in enumerate(islice(repeat(loader), args.steps), start=1):
            with accelerator.accumulate(model):
                loss = next_byte_loss(model(ids), targets).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                rates.append(scheduler.get_last_lr()[0])  # read before step(): the rate that this step uses
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[step - 1] = loss.detach()  # stays on the device: .item() would wait for it at every step
            progress.update(step, loss=losses[step - 1], lr=rates[-1], units=ids.numel())

    model.eval()
    curve = accelerator.reduce(losses, "mean").tolist()
    bits = bits_per_byte(model, held_out, accelerator)
    prompt = torch.tensor([list(b"    def __init__(self, ")], device=accelerator.device)
    sample = bytes(generate(model, prompt, args.sample, block=args.block)[0].tolist())
    accelerator.save_model(model, args.output / "model")

    if accelerator.is_main_process:
        (args.output / "model" / "config.json").write_text(json.dumps(asdict(config), indent=2))
        (args.output / "sample.txt").write_bytes(sample)
        pictured = save_curves(args.output, [nats / math.log(2) for nats in curve], rates, bits)
        print(f"\n{sample.decode(errors='replace')}\n")
        print(f"held-out loss: {bits:.3f} bits per byte (8 before any learning)")
        print(f"weights: {args.output / 'model'} · {pictured}")
    accelerator.end_training()


def read_arguments() -> argparse.Namespace:
    """The script's own arguments; everything about processes, stage and offload is the launcher's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=at_least_one, default=400, help="batches per process")
    parser.add_argument("--batch_size", type=at_least_one, default=8, help="blocks per process and batch")
    parser.add_argument("--block", type=at_least_one, default=128, help="bytes that the model looks back")
    parser.add_argument("--width", type=at_least_one, default=128, help="width of the residual stream")
    parser.add_argument("--layers", type=at_least_one, default=4)
    parser.add_argument("--heads", type=at_least_one, default=4)
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--sample", type=int, default=400, help="bytes of text to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for curves and weights")
    return parser.parse_args()


def at_least_one(text: str) -> int:
    """The argument type of a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def repeat(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Epoch after epoch, without end."""
    while True:
        yield from loader


@torch.no_grad()
def bits_per_byte(model: Callable[[Tensor], Tensor], loader: Iterable[Batch], accelerator: Accelerator) -> float:
    """Mean loss over the whole text, in bits: what an ideal compressor driven by the model would need for a byte."""
    nats = [accelerator.gather_for_metrics(next_byte_loss(model(ids), targets)) for ids, targets in loader]
    return float(torch.cat(nats).mean()) / math.log(2)


if __name__ == "__main__":
    main()
