"""Data that is read as needed: an IterableDataset without a length, under ZeRO-1 on two processes.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --zero_stage 1 --num_processes 2 examples/streaming_data.py

The stream yields the same samples on every process. The prepared loader gives each process, and each of its workers, a
separate part. All processes stop at the same batch, wherever the stream ends.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

try:
    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    """The lines of Python's own library, one after another, as bytes of one length."""

    def __init__(self, files: int, length: int = 32) -> None:
        self.files = files
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        """Read one file after another."""
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: self.files]:
            for line in file.read_bytes().splitlines():
                text = line.strip()[: self.length].ljust(self.length)
                yield torch.tensor(list(text))


class NextByte(nn.Module):
    """Predicts each byte from the bytes before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        return self.head(self.recurrent(self.embedding(ids))[0])


def main() -> None:
    """Train on one pass over the stream."""
    accelerator = Accelerator()
    set_seed(0)
    loader = DataLoader(Lines(files=12), batch_size=32, num_workers=1)
    model = NextByte()
    optimizer = AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, ids in enumerate(loader):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step}: loss {mean.item():.4f}")
    accelerator.print(f"the stream ended after {step + 1} batches for each process")
    accelerator.end_training()


if __name__ == "__main__":
    main()
