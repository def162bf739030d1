"""Unconditional training of diffusers: UNet, EMA, save and load hooks. The run resumes halfway."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn import functional

from zero_plugin import Accelerator

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
KIND = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
BLOCKS = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}


def add_hooks(accelerator: Accelerator, ema: Any) -> None:
    """Save the model and its EMA in diffusers' own folders instead of the checkpoint's weights."""

    def save(models, weights, output_dir):  # type: ignore[no-untyped-def]
        if accelerator.is_main_process:
            ema.save_pretrained(Path(output_dir, "unet_ema"))
            for model in models:
                model.save_pretrained(Path(output_dir, "unet"))
                weights.pop()

    def load(models, input_dir):  # type: ignore[no-untyped-def]
        stored = type(ema).from_pretrained(Path(input_dir, "unet_ema"), UNet2DModel)
        ema.load_state_dict(stored.state_dict())
        ema.to(accelerator.device)
        for _ in range(len(models)):
            model = models.pop()
            stored = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            model.register_to_config(**stored.config)
            model.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    """Take eight steps of eight images. Save the state after the fourth, and load it after the sixth."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    from diffusers.training_utils import EMAModel  # diffusers imports deepspeed only if stage 3 is configured by then

    unet = UNet2DModel(**KIND, **BLOCKS)
    ema = EMAModel(unet.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=unet.config)
    noise_scheduler = DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3, weight_decay=1e-3)
    rates = get_cosine_schedule_with_warmup(optimizer, 2 * WORLD, 12 * WORLD)
    unet, optimizer, rates = accelerator.prepare(unet, optimizer, rates)
    add_hooks(accelerator, ema)

    def train(step: int) -> float:
        draw = torch.Generator().manual_seed(step % 2)
        images = torch.linspace(-1, 1, 64).view(1, 1, 8, 8).repeat(8, 1, 1, 1)
        noise = torch.randn(images.shape, generator=draw)
        times = torch.randint(0, 20, (8,), generator=draw)
        noisy, noise, times = (
            whole.chunk(WORLD)[accelerator.process_index]
            for whole in (noise_scheduler.add_noise(images, noise, times), noise, times)
        )
        with accelerator.accumulate(unet):
            loss = functional.mse_loss(unet(noisy, times).sample, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        ema.step(unet.parameters())  # at stage 3 diffusers gathers each of them separately
        return float(accelerator.reduce(loss.detach(), "mean"))

    losses = [train(step) for step in range(4)]
    folder = Path(accelerator.save_state("checkpoint-4"))
    assert (folder / "unet" / "diffusion_pytorch_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    twice = [train(step) for step in (4, 5)]
    averaged = [p.clone() for p in ema.shadow_params]
    accelerator.load_state(folder)
    losses += [train(step) for step in range(4, 8)]
    assert losses[4:6] == twice, (losses, twice)
    assert any(not torch.equal(*pair) for pair in zip(averaged, ema.shadow_params, strict=True))
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
