"""A GAN: two models, each with its own optimizer, under ZeRO-2. The generator learns to draw handwritten digits.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --zero_stage 2 --num_processes 2 examples/gan.py

It needs scikit-learn for the digits. The losses of a GAN do not show whether it learns. The script therefore prints the
distance between drawn and real pictures: the distance between the means and standard deviations of their pixels.
"""

try:
    from sklearn.datasets import load_digits

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, NOISE = 20, 16


def build(inputs: int, outputs: int) -> nn.Sequential:
    """Build a network of three layers."""
    layers = [nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(128, outputs))


def distance(drawn: Tensor, real: Tensor) -> float:
    """Return the distance between two sets of pictures, from the statistics of their pixels."""
    parts = (drawn.mean(0) - real.mean(0), drawn.std(0) - real.std(0))
    return sum(part.square().sum().item() for part in parts) ** 0.5


def main() -> None:
    """Train both against each other."""
    accelerator = Accelerator()
    set_seed(0)
    pictures = torch.tensor(load_digits().data).float() / 8 - 1
    loader = DataLoader(TensorDataset(pictures), batch_size=32, shuffle=True, drop_last=True)
    generator, critic = build(NOISE, 64), build(64, 1)
    g_optimizer = Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    c_optimizer = Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, g_optimizer, c_optimizer, loader = accelerator.prepare(
        generator, critic, g_optimizer, c_optimizer, loader
    )

    for epoch in range(EPOCHS + 1):
        with torch.no_grad():
            drawn = generator(torch.randn(512, NOISE, device=accelerator.device)).float().cpu()
        accelerator.print(f"epoch {epoch}: distance {distance(drawn, pictures):.4f}")
        if epoch == EPOCHS:
            break
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE, device=accelerator.device)
            fake = generator(noise)

            c_optimizer.zero_grad()
            accelerator.backward(softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean())
            c_optimizer.step()

            g_optimizer.zero_grad()
            critic.requires_grad_(False)  # this step trains the generator only
            accelerator.backward(softplus(-critic(fake)).mean())
            critic.requires_grad_(True)
            g_optimizer.step()

    accelerator.save_model(generator, "examples_output/generator")
    accelerator.end_training()


if __name__ == "__main__":
    main()
