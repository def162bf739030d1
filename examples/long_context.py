"""Long samples: two processes share each sample, the loss is computed in chunks, and blocks are recomputed.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config zero3 --num_processes 2 --sequence_parallel_size 2 examples/long_context.py

It needs transformers. Each process computes on half of every sequence, with attention over all of it. The loop is an
ordinary one. `--length 32768` at the end of the command trains on longer samples. The model learns the bytes of
Python's own library.
"""

import argparse
import sysconfig
import time
from itertools import islice
from pathlib import Path

try:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from zero_plugin import Accelerator, set_seed
    from zero_plugin.long_context import chunk_loss
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader


def read_arguments() -> argparse.Namespace:
    """Return the length of a sample and the number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample (default 2048)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    return parser.parse_args()


def read_blocks(length: int) -> torch.Tensor:
    """Return the library's source as blocks of bytes, `[blocks, length]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8).view(-1, length).long()


def main() -> None:
    """Train on samples of one length; each printed loss is the mean of up to ten steps."""
    arguments = read_arguments()
    accelerator = Accelerator()
    set_seed(0)
    loader = DataLoader(read_blocks(arguments.length), batch_size=1, shuffle=True)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=arguments.length,
        bos_token_id=0,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable()  # each block keeps only its input, and is recomputed in the backward
    chunk_loss(model, 8)  # only the logits of an eighth of the tokens exist at a time
    optimizer = AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    started, losses = time.perf_counter(), torch.zeros(arguments.steps)
    for step, ids in enumerate(islice(loader, arguments.steps)):
        loss = model(input_ids=ids, labels=ids).loss  # of the complete sample; equal on all processes that share it
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if step == 0 or (step + 1) % 10 == 0:
            mean = accelerator.reduce(losses[max(0, step - 9) : step + 1].mean(), "mean")
            seconds = (time.perf_counter() - started) / (step + 1)
            accelerator.print(f"step {step}: loss {mean:.4f}, {arguments.length} tokens, {seconds:.1f} s a step")
    accelerator.end_training()


if __name__ == "__main__":
    main()
