"""A small GPT-2 learns Python source from scratch, with warm-up, clipping and transformers' own saving."""

import inspect
import json
import math
import sys
import textwrap
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, get_scheduler

logger = get_logger(__name__)


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(11)
    text = torch.tensor(list(inspect.getsource(textwrap).encode()))
    blocks = text[: len(text) // 48 * 48].view(-1, 48)
    train_loader = DataLoader(
        [{"input_ids": b, "labels": b} for b in blocks[:96]],
        batch_size=6,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    eval_loader = DataLoader([{"input_ids": b, "labels": b} for b in blocks[96:131]], batch_size=8)
    config = GPT2Config(
        vocab_size=256, n_positions=48, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    no_decay = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)

    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    updates_per_epoch = math.ceil(len(train_loader) / accelerator.gradient_accumulation_steps)
    epochs = 2
    scheduler = accelerator.prepare(
        get_scheduler(
            "cosine",
            optimizer=optimizer,
            num_warmup_steps=2 * accelerator.num_processes,
            num_training_steps=epochs * updates_per_epoch * accelerator.num_processes,
        )
    )

    losses, rates, norms, perplexities = [], [], [], []
    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(accelerator.gather(loss.detach()).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        found = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            found.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        perplexities.append(math.exp(torch.cat(found).mean().item()))
    assert len(rates) == epochs * updates_per_epoch

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    folder = Path(output).with_name("model")
    unwrapped.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.eval()
    with torch.no_grad():
        reloaded = again(**next(iter(eval_loader))).loss.item() if accelerator.num_processes == 1 else None
    if accelerator.is_main_process:
        results = {
            "losses": losses,
            "rates": rates,
            "norms": norms,
            "perplexities": perplexities,
            "reloaded": reloaded,
            "weights": sum(p.abs().sum().item() for p in again.parameters()),
        }
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
