"""LoRA with PEFT: only adapters are trained and saved, and ZeRO-3 partitions the frozen model.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config zero3 examples/lora.py

It needs transformers and peft. The model is built from a config, so nothing is downloaded; in your script it comes from
`from_pretrained`. The adapters and the output layer learn the bytes of Python's own library.
"""

import sysconfig
from itertools import islice
from pathlib import Path

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

STEPS = 60
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, bos_token_id=0
)


def read_blocks(length: int = 48) -> torch.Tensor:
    """Return the library's source as blocks of bytes, `[blocks, length]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[:40])
    return torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8).view(-1, length).long()


def main() -> None:
    """Train the adapters and save only them."""
    accelerator = Accelerator()
    set_seed(0)
    loader = DataLoader(read_blocks(), batch_size=16, shuffle=True, drop_last=True)
    model = AutoModelForCausalLM.from_config(CONFIG)  # at stage 3, each process keeps only its partition
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, ids in enumerate(islice(loader, STEPS)):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step}: loss {mean.item():.4f}")

    accelerator.save_model(model, "examples_output/adapters")  # a folder for PeftModel.from_pretrained
    accelerator.end_training()


if __name__ == "__main__":
    main()
