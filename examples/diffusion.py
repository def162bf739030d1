"""Diffusion (DDPM): a small U-Net learns to remove noise from handwritten digits, and then draws one from noise.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --zero_stage 2 --num_processes 2 examples/diffusion.py

It needs scikit-learn for the digits.
"""

try:
    from sklearn.datasets import load_digits

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss, silu
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, TIMES = 12, 50
BETAS = torch.linspace(1e-3, 0.2, TIMES)
KEPT = torch.cumprod(1 - BETAS, 0)  # the fraction of the picture that is left at each time


class UNet(nn.Module):
    """Predicts the noise in pictures of 8 × 8 pixels, from the noisy picture and the time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.start = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.end = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, pictures: Tensor, times: Tensor) -> Tensor:
        """Return the noise `[batch, 1, 8, 8]`."""
        fine = silu(self.start(pictures) + self.time(times)[:, :, None, None])
        coarse = silu(self.middle(silu(self.down(fine))))
        return self.end(silu(self.up(torch.cat((fine, interpolate(coarse, scale_factor=2)), 1))))


@torch.no_grad()
def draw(model: nn.Module, device: torch.device) -> Tensor:
    """Draw one picture from pure noise, `[8, 8]`; every process must call this."""
    picture = torch.randn(1, 1, 8, 8, device=device)
    for time in reversed(range(TIMES)):
        noise = model(picture, torch.tensor([time], device=device)).float()
        picture = (picture - BETAS[time] / (1 - KEPT[time]).sqrt() * noise) / (1 - BETAS[time]).sqrt()
        if time:
            picture += BETAS[time].sqrt() * torch.randn_like(picture)
    return picture[0, 0].cpu()


def main() -> None:
    """Train, then draw."""
    accelerator = Accelerator()
    set_seed(0)
    pictures = torch.tensor(load_digits().images).float()[:, None] / 8 - 1
    loader = DataLoader(TensorDataset(pictures), batch_size=32, shuffle=True, drop_last=True)
    model = UNet()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kept = KEPT.to(accelerator.device)

    for epoch in range(EPOCHS):
        losses = []
        for (clean,) in loader:
            with accelerator.accumulate(model):
                times = torch.randint(TIMES, (len(clean),), device=clean.device)
                left = kept[times][:, None, None, None]
                noise = torch.randn_like(clean)
                loss = mse_loss(model(left.sqrt() * clean + (1 - left).sqrt() * noise, times).float(), noise)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(torch.stack(losses).mean(), 'mean').item():.4f}")

    for row in draw(model, accelerator.device):
        accelerator.print("".join(" .:*#"[min(max(int(2.5 * value + 2.5), 0), 4)] * 2 for value in row.tolist()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
