"""transformers' Trainer on a tiny GPT-2."""

import json
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def samples() -> list[dict[str, torch.Tensor]]:
    """Return 48 sequences that count upwards."""
    rows = [(torch.arange(16) + index) % 32 for index in range(48)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(**more: object) -> TrainingArguments:
    """Return the arguments of six steps of eight sequences."""
    return TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=8 // WORLD,
        max_steps=6,
        learning_rate=1e-2,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **more,
    )


def tiny_gpt2() -> GPT2LMHeadModel:
    """Create a GPT-2 without dropout, which each process would draw differently."""
    set_seed(0)
    size = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    size.attn_pdrop = size.resid_pdrop = size.embd_pdrop = 0.0
    return GPT2LMHeadModel(size)


def report(trainer: Trainer) -> None:
    """Print the losses that the Trainer has logged."""
    if trainer.is_world_process_zero():
        print(json.dumps({"losses": [line["loss"] for line in trainer.state.log_history if "loss" in line]}))


if __name__ == "__main__":
    trainer = Trainer(tiny_gpt2(), arguments(), train_dataset=samples())
    trainer.train()
    report(trainer)
