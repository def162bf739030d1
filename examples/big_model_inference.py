"""Inference of a model that fits no device: what exceeds the memory that it may use stays in its files on disk.

zero-plugin launch --config cpu examples/big_model_inference.py

It needs transformers. The checkpoint is written first, since nothing is downloaded. Each process runs its part of the
prompts; module by module, weights are read for the forward and released after it.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from zero_plugin import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, set_seed

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, bos_token_id=0
)
FOLDER = "examples_output/big_model"
MEMORY = "16MiB"  # what the weights may occupy: on your machine, for example, {0: "20GiB", "cpu": "60GiB"}


def main() -> None:
    """Write a checkpoint, run it mostly from disk, and compare with the plain model."""
    accelerator = Accelerator()
    set_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG).eval()
    if accelerator.is_main_process:
        plain.save_pretrained(FOLDER, max_shard_size="10MB")
    accelerator.wait_for_everyone()

    with init_empty_weights():  # no memory is allocated
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = load_checkpoint_and_dispatch(model, FOLDER, device_map="auto", max_memory={"cpu": MEMORY}).eval()
    places = list(model.hf_device_map.values())
    size = sum(parameter.numel() * parameter.element_size() for parameter in plain.parameters())
    accelerator.print(f"{size / 2**20:.0f} MiB of weights; of {len(places)} parts {places.count('disk')} stay on disk")

    prompts = torch.randint(CONFIG.vocab_size, (4, 12))
    with accelerator.split_between_processes(prompts) as mine, torch.no_grad():
        difference = (model(mine).logits - plain(mine).logits).abs().max()
    difference = accelerator.gather(difference.to(accelerator.device)).max()
    accelerator.print(f"largest difference from the plain model: {difference.item():.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
