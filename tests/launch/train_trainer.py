"""A script for transformers' Trainer, without this package: a tiny GPT-2; prints the results as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """48 sequences that count upwards."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + index) % 32
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train six steps of eight sequences. Further arguments are `name=number` for TrainingArguments."""
    given = {name: json.loads(value) for name, value in (argument.split("=") for argument in sys.argv[1:])}
    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **given,
    )
    set_seed(0)
    size = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    size.attn_pdrop = size.resid_pdrop = size.embd_pdrop = 0.0
    trainer = Trainer(GPT2LMHeadModel(size), arguments, train_dataset=Tokens())
    trainer.train()
    if trainer.is_world_process_zero():
        plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
        print(
            json.dumps(
                {
                    "processes": arguments.world_size,
                    "kind": trainer.accelerator.distributed_type.value,
                    "wrapped": type(trainer.model_wrapped).__name__,
                    "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
                    "config": plugin and {**plugin.deepspeed_config, "steps_per_print": None},
                }
            )
        )


if __name__ == "__main__":
    main()
