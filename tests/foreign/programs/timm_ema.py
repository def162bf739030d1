"""A vision transformer from timm with EMA, scheduler and optimizer groups."""

import json
import os

import timm
import torch
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.nn import functional

from zero_plugin import Accelerator

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    """Take eight steps of eight images. Report the averaged model's loss too."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **size)
    average = ModelEmaV3(model, decay=0.5)
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=3e-3)
    rates = CosineLRScheduler(optimizer, t_initial=8, warmup_t=2, warmup_lr_init=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(8):
        draw = torch.Generator().manual_seed(step % 2)
        images, labels = torch.randn(8, 3, 16, 16, generator=draw), torch.arange(8) % 4
        images, labels = (whole.chunk(WORLD)[accelerator.process_index] for whole in (images, labels))
        loss = functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        rates.step(step + 1)
        with accelerator.whole_weights(model):
            average.update(accelerator.unwrap_model(model))
        with torch.no_grad():
            of_average = functional.cross_entropy(average.module(images), labels)
        losses.append(float(accelerator.reduce(loss.detach() + of_average, "mean")))
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
