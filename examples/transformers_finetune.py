"""A transformers model under ZeRO-3: a small Llama learns the bytes of Python's own library, and writes some.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config zero3 examples/transformers_finetune.py

It needs transformers. The model is built from a config, so nothing is downloaded. To fine-tune your own model, replace
`from_config` with `AutoModelForCausalLM.from_pretrained(folder)`. The weights are then partitioned as they are read.
The script shows what the model predicts and writes before and after the training.
"""

import sysconfig
from itertools import islice
from pathlib import Path

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

STEPS = 100
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, bos_token_id=0
)


def read_blocks(length: int = 128) -> torch.Tensor:
    """Return the library's source as blocks of bytes, `[blocks, length]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[:40])
    return torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8).view(-1, length).long()


@torch.no_grad()
def show_skill(accelerator: Accelerator, model: torch.nn.Module, text: torch.Tensor, when: str) -> None:
    """Print how much of an unseen text the model predicts, and what it writes; every process must call this."""
    model.eval()
    guesses = model(input_ids=text).logits[:, :-1].argmax(-1)
    right = (guesses == text[:, 1:]).float().mean().item()
    prompt = torch.tensor([list(b"def __init__(self")], device=accelerator.device)
    written = accelerator.unwrap_model(model).generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    accelerator.print(f"{when}: {right:.1%} of unseen bytes are predicted right; writes {bytes(written[0].tolist())}")
    model.train()


def main() -> None:
    """Train, show what changed, and save a folder for `from_pretrained`."""
    accelerator = Accelerator()
    set_seed(0)
    blocks = read_blocks()
    unseen = blocks[-64:].to(accelerator.device)
    loader = DataLoader(blocks[:-64], batch_size=16, shuffle=True, drop_last=True)
    model = AutoModelForCausalLM.from_config(CONFIG)  # at stage 3, each process keeps only its partition
    optimizer = AdamW(model.parameters(), lr=4e-3)
    # A scheduler advances once per process and step, as in Accelerate.
    steps = STEPS * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    show_skill(accelerator, model, unseen, "before")
    for step, ids in enumerate(islice(loader, STEPS)):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step}: loss {mean.item():.4f}")

    show_skill(accelerator, model, unseen, "after")
    accelerator.save_model(model, "examples_output/finetuned")
    accelerator.end_training()


if __name__ == "__main__":
    main()
