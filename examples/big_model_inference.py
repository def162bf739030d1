"""Inference of a model larger than the allowed memory: weights that do not fit stay in their files on disk.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config cpu examples/big_model_inference.py

It needs transformers. The script first writes a checkpoint, so nothing is downloaded. Each process runs its part of the
prompts. The weights of each module are read for its forward and released afterwards.
"""

try:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from zero_plugin import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, bos_token_id=0
)
FOLDER = "examples_output/big_model"
MEMORY = "16MiB"  # limit for the weights: on your machine, for example, {0: "20GiB", "cpu": "60GiB"}


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
    accelerator.print(f"{size / 2**20:.0f} MiB of weights; {places.count('disk')} of {len(places)} parts stay on disk")

    prompts = torch.randint(CONFIG.vocab_size, (4, 12))
    with accelerator.split_between_processes(prompts) as mine, torch.no_grad():
        difference = (model(mine).logits - plain(mine).logits).abs().max()
    difference = accelerator.gather(difference.to(accelerator.device)).max()
    accelerator.print(f"largest difference from the plain model: {difference.item():.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
