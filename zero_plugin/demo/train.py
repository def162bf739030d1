"""Trains a byte-level GPT on Python's own library, in an ordinary loop that any launch config can run.

The model is plain PyTorch (rotary positions, pre-norm blocks) and has no code for distributed training. Its text exists
on every machine: the source of Python's standard library, as blocks of bytes. A run ends with its curves, as numbers
and as a plot.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name in PyTorch code
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from zero_plugin import Accelerator, set_seed
from zero_plugin.distributed.messages import QUIET_VARIABLE, is_set
from zero_plugin.errors import ConfigError, MachineError, Problem
from zero_plugin.loop.progress import Progress


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model: `hidden_size` is the size of the residual stream, `block` the longest input in bytes."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    block: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not split into {self.heads} heads of an even size; "
                f"write a multiple of {2 * self.heads}"
            )


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map the stream `[batch, length, hidden size]` to the same shape."""
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, length, head size]
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class GPT(nn.Module):
    """Predicts each byte from those before it: `[batch, length]` byte values to `[batch, length, 256]` logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds two branches to the stream. Smaller initial weights keep the size of the sum constant
                # (GPT-2, §2.3).
                shrink = (2 * config.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        x = self.embedding(ids)
        rotation = _rotation(ids.shape[1], self.config.hidden_size // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotation(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines `[length, head size / 2]` of the rotary embedding (arXiv 2104.09864, eq. 15)."""
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / head_width, device=like.device)
    # Angles are in fp32: bf16 cannot represent all positions above 256.
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each block, `[batch]`, in nats per byte and fp32.

    Args:
        logits: `[batch, length, 256]`.
        targets: the actual next bytes, `[batch, length]`.
    """
    nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(1)


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Tensor,
    count: int,
    *,
    block: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Tensor:
    """Sample `count` bytes after `[batch, length]` ones; return prompt and continuation together.

    `forward` is the model that `prepare` returned. ZeRO-3 gathers weights inside it, so every process must call
    `generate` with the same `count`. With the same `seed`, all processes draw the same bytes.
    """
    draw = torch.Generator().manual_seed(seed)  # on the CPU, so every kind of device draws the same numbers
    for _ in range(count):
        logits = forward(prompt[:, -block:])[:, -1].float().cpu()
        best, candidates = logits.topk(top_k)
        picked = torch.multinomial((best / temperature).softmax(-1), 1, generator=draw)
        prompt = torch.cat((prompt, candidates.gather(1, picked).to(prompt.device)), dim=1)
    return prompt


_INK, _MUTED, _BLUE, _RED = "#222222", "#8a8a8a", "#1f5fa8", "#c0392b"


def save_curves(folder: Path, losses: Sequence[float], rates: Sequence[float], held_out: float) -> str:
    """Write `curves.csv`, and `curves.png` if matplotlib is installed; return a sentence that names the files.

    Args:
        folder: an existing folder.
        losses: training loss of each step, bits per byte.
        rates: learning rate of each step.
        held_out: loss on held-out text after the last step, bits per byte.
    """
    table = folder / "curves.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_bits_per_byte", "learning_rate"])
        writer.writerows(zip(range(1, len(losses) + 1), losses, rates, strict=True))
    try:
        draw_curves(folder / "curves.png", losses, rates, held_out)
    except ModuleNotFoundError:
        return f"curves: {table} (for a plot: pip install 'zero-plugin[pictures]')"
    return f"curves: {folder / 'curves.png'}, {table}"


def draw_curves(path: Path, losses: Sequence[float], rates: Sequence[float], held_out: float) -> None:
    """Draw the curves of `save_curves` into a PNG of 1600 × 1200 pixels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot: it would choose a window system and keep the figure alive.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = range(1, len(losses) + 1)
    figure = Figure(figsize=(8, 6), dpi=200, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    top.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1, label="training, each step")
    reach = max(1, len(losses) // 50)
    top.plot(steps, _smooth(losses, reach), color=_BLUE, linewidth=2, label=f"training, mean of {2 * reach + 1} steps")
    top.plot(len(losses), held_out, "o", color=_RED, markersize=7, clip_on=False, zorder=3, label="held-out text")
    outside = (8, 0)  # outside of the axes: there the text covers no line
    top.annotate(
        f"{held_out:.2f}", (len(losses), held_out), outside, textcoords="offset points", va="center", color=_RED
    )
    top.set_ylabel("loss (bits per byte)", color=_INK)
    top.set_ylim(bottom=0)
    figure.suptitle("A byte-level GPT learns Python's standard library", x=0.01, ha="left", color=_INK)
    top.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2, labelcolor=_INK)

    bottom.plot(steps, rates, color=_INK, linewidth=1.5)
    bottom.set_ylabel("learning rate", color=_INK)
    bottom.set_xlabel("step", color=_INK)
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlim(0, len(losses))

    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_MUTED)
        axes.tick_params(colors=_MUTED, labelcolor=_INK)
        axes.grid(axis="y", color=_MUTED, alpha=0.2, linewidth=0.8)
    figure.savefig(path)


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean over `reach` steps on each side, or over fewer at the ends."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def read_text(*, max_bytes: int = 8_000_000, held_out_bytes: int = 131_072) -> tuple[bytes, bytes]:
    """Return training text and held-out text from different files; the same on every call and every process.

    Args:
        max_bytes: largest size of the training text.
        held_out_bytes: size of the held-out text.

    Raises:
        MachineError: the Python installation has no library sources.
    """
    files = iter(_files(Path(sysconfig.get_path("stdlib"))))
    held_out = _join(files, held_out_bytes)
    train = _join(files, max_bytes)
    if not train:
        raise MachineError(
            f"{sysconfig.get_path('stdlib')} holds too few Python sources to train on ({len(held_out)} bytes); "
            "run the demo with a Python that includes its standard library as .py files"
        )
    return train, held_out


def _files(root: Path) -> list[Path]:
    files = [p.relative_to(root) for p in root.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(root).parts)]
    # Sorted by a hash of the name. This order is fixed, and every prefix of it is a fair sample of the library.
    files.sort(key=lambda p: hashlib.sha256(p.as_posix().encode()).digest())
    return [root / p for p in files]


def _join(files: Iterator[Path], limit: int) -> bytes:
    text = bytearray()
    while len(text) < limit and (file := next(files, None)):
        text += file.read_bytes()
    return bytes(text[:limit])


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into blocks of `block` bytes: item i is (bytes, the bytes shifted by one), both `[block]` of int64."""

    def __init__(self, text: bytes, block: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block = block

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(0, len(self) * self.block, self.block)[index]  # raises IndexError beyond the last block
        window = self.text[start : start + self.block + 1].long()
        return window[:-1], window[1:]


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
    show = print if accelerator.is_main_process and not is_set(QUIET_VARIABLE) else lambda _: None
    show(
        f"{parameters:,} parameters, {len(train_text):,} bytes of text, "
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}"
    )

    updates = args.steps // accelerator.gradient_accumulation_steps
    if not updates:
        message = f"{args.steps} batches make no optimizer step of {accelerator.gradient_accumulation_steps} batches"
        raise ConfigError([Problem("--steps", "", message, "Give more steps, or accumulate fewer batches.")])
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    total = updates * accelerator.num_processes  # a prepared scheduler advances once per process and optimizer step
    scheduler = OneCycleLR(optimizer, args.lr, total, pct_start=0.1, anneal_strategy="linear", cycle_momentum=False)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    losses = torch.zeros(args.steps, device=accelerator.device)
    rates: list[float] = []
    model.train()
    with Progress(total=args.steps, model=model, sequence_length=args.block) as progress:
        for step, (ids, targets) in enumerate(islice(repeat(loader), args.steps), start=1):
            with accelerator.accumulate(model):
                loss = next_byte_loss(model(ids), targets).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                rates.append(float(scheduler.get_last_lr()[0]))  # read before step(): this step's rate
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses[step - 1] = loss.detach()  # stays on the device: .item() would wait for the device at every step
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
        plotted = save_curves(args.output, [nats / math.log(2) for nats in curve], rates, bits)
        show(f"\n{sample.decode(errors='replace')}\n")
        show(f"held-out loss: {bits:.3f} bits per byte (8 before any learning)")
        show(f"weights: {args.output / 'model'} · {plotted}")
    accelerator.end_training()


def read_arguments() -> argparse.Namespace:
    """Return the script's own arguments; the launcher handles processes, stage and offload."""
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
    """Parse a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)


def repeat(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of epoch after epoch, without end."""
    while True:
        yield from loader


@torch.no_grad()
def bits_per_byte(model: Callable[[Tensor], Tensor], loader: Iterable[Batch], accelerator: Accelerator) -> float:
    """Return the mean loss over the text in bits per byte, which an ideal compressor with this model would need."""
    nats = [accelerator.gather_for_metrics(next_byte_loss(model(ids), targets)) for ids, targets in loader]
    return float(torch.cat(nats).mean()) / math.log(2)


if __name__ == "__main__":
    main()
