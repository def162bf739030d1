"""The parity suite's reference: hand-written single-process torch on the global batch, without zero_plugin's loop."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from cases import EPOCHS, Case, width_for
from model import Net, code_schedule, make_data, make_model, parameter_groups
from torch import Tensor

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PlainLion(torch.optim.Optimizer):
    """Lion as in arXiv:2302.06675, algorithm 2, tensor by tensor."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update once."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                b1, b2 = group["betas"]
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                self.state[p]["m"] = b2 * m + (1 - b2) * p.grad


def run_reference(path: str, case: Case, device: str) -> dict[str, Any]:
    """Return losses and applied learning rates by step, the norms, and the final weights of plain torch on `device`."""
    model = make_model(width_for(path), case.branch).to(device)
    name, arguments = case.optimizer
    kind = PlainLion if name == "Lion" else getattr(torch.optim, name)
    compute: Net = model
    if case.precision != "no" and path.startswith("zero"):
        # ZeRO's regime: 16-bit weights, gradients and forward; fp32 master weights that start from the 16-bit weights.
        compute = make_model(width_for(path), case.branch).to(device, HALF[case.precision])
        with torch.no_grad():
            for master, weight in zip(model.parameters(), compute.parameters(), strict=True):
                master.copy_(weight)
    optimizer = kind(parameter_groups(model, arguments["lr"], case.groups), **arguments)
    schedule = _schedule(case, optimizer)
    x, y = (tensor.to(device) for tensor in make_data(8 * case.batches))
    result: dict[str, Any] = {"losses": [], "rates": [], "norms": [], "scales": []}
    criterion = torch.nn.MSELoss()
    scaler = _scaler(case)
    windows = 0
    for _ in range(EPOCHS):
        for start in range(0, case.batches, case.accumulation):
            window = range(start, min(start + case.accumulation, case.batches))
            gradients: list[Tensor | None] = [None for _ in model.parameters()]
            for i in window:
                rows = slice(8 * i, 8 * i + 8)
                loss = _loss(compute, x[rows], y[rows], i, case, path, criterion)
                result["losses"].append(loss.item())
                factor = float("inf") if case.poisons(windows) else 1.0
                (loss * (factor * scaler.cur_scale / len(window))).backward()
                for k, p in enumerate(compute.parameters()):
                    if p.grad is not None:
                        gradient = p.grad.float() / scaler.cur_scale
                        gradients[k] = gradient if gradients[k] is None else gradients[k] + gradient
                        p.grad = None
            windows += 1
            for p, g in zip(model.parameters(), gradients, strict=True):
                # torch leaves a parameter without a gradient in this window alone. In ZeRO's flat partitions its
                # gradient is zero, so weight decay and momentum continue.
                p.grad = torch.zeros_like(p) if g is None and path.startswith("zero") else g
            skipped = any(p.grad is not None and not p.grad.isfinite().all() for p in model.parameters())
            limit = case.clip if case.clip is not None else case.config_clip
            if limit is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
                if case.clip is not None:
                    result["norms"].append(float("inf") if skipped else norm)
            with patch("deepspeed.comm.get_rank", return_value=1):  # the folder where it logs nothing
                scaler.update_scale(skipped)
            result["scales"].append(scaler.cur_scale)
            if skipped:
                optimizer.zero_grad()
                continue
            result["rates"].append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if compute is not model:
                with torch.no_grad():
                    for master, weight in zip(model.parameters(), compute.parameters(), strict=True):
                        weight.copy_(master)
    result["state"] = {name: tensor.cpu() for name, tensor in compute.state_dict().items()}
    return result


def _loss(compute: Net, x: Tensor, y: Tensor, i: int, case: Case, path: str, criterion: Any) -> Tensor:
    if case.precision != "no" and not path.startswith("zero"):
        with torch.autocast(x.device.type, HALF[case.precision]):
            predicted = compute(x, i % 2 == 1)
        return criterion(predicted.float(), y)
    dtype = next(compute.parameters()).dtype
    return criterion(compute(x.to(dtype), i % 2 == 1).float(), y)


def _scaler(case: Case) -> Any:
    """Build the scaler: DeepSpeed's own class is the meaning of the section."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    if case.precision != "fp16":
        return LossScaler(1.0)
    section = dict(case.fp16)
    scale, window = 2.0 ** section["initial_scale_power"], section["loss_scale_window"]
    return DynamicLossScaler(scale, window, min_scale=1, delayed_shift=2, consecutive_hysteresis=False)


def _schedule(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    if case.schedule is None:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, code_schedule)
    # Sections mean DeepSpeed's own classes, stepped as its engine does.
    from deepspeed.runtime import lr_schedules

    name, arguments = case.schedule
    return getattr(lr_schedules, name)(optimizer, **arguments)
