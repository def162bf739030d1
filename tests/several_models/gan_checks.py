"""A GAN on every path trains as in plain single-process torch."""

from __future__ import annotations

import torch
from gan import Case, train, train_plain
from paths import FURTHER, PAIR, SINGLE, assert_near, running, weights

# Nothing stays out of these on any path, so that each feature meets each path.
EVERYWHERE = {
    "by-hand": Case(frozen=False),
    "frozen": Case(frozen=True, one_call=True, adam=True, clip=0.3),
    "context": Case(frozen=True, accumulation=2, style="context", clip=0.2),
    "left-gradients": Case(frozen=False, accumulation=2, style="context", clip=0.2, one_call=True),
    "short-window": Case(frozen=True, accumulation=2, batches=5),
    "steps-at-the-end": Case(frozen=True, late=True, clip=0.3),
    "bf16": Case(frozen=False, accumulation=2, style="context", clip=0.2, precision="bf16"),
}
ON_SOME = {
    "contexts": Case(frozen=False, accumulation=2, style="contexts"),
    "short-window-in-context": Case(frozen=False, accumulation=3, batches=4, style="context", one_call=True),
    "left-gradients-at-the-end": Case(frozen=False, late=True),
}
SOME = ("ddp", "zero1", "zero2-cpu", "zero3")


def check(path: str, case: Case) -> None:
    """Losses, norms and the weights of both models."""
    wanted = train_plain(case)
    with running(
        path,
        gradient_accumulation_steps=case.accumulation,
        mixed_precision=case.precision,
    ) as accelerator:
        found = train(accelerator, case, weights)
    assert len(found.norms) == len(wanted.norms)
    # The reference is fp32 throughout.
    near = 1e-5 if case.precision == "no" else 1e-2
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), atol=near, rtol=0)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(wanted.norms), atol=near, rtol=near)
    for got, expected in zip(found.weights, wanted.weights, strict=True):
        assert_near(got, expected, 1e-4 if case.precision == "no" else 2e-2)


def cases_of(path: str) -> dict[str, Case]:
    """What is trained on a path."""
    if path in FURTHER:
        return {name: EVERYWHERE[name] for name in ("left-gradients", "frozen")}
    return EVERYWHERE | (ON_SOME if path in SOME else {})


CHECKS = {
    f"{path}-{name}": (
        [count for count, known in ((1, SINGLE), (2, (*PAIR, *FURTHER))) if path in known],
        lambda folder, path=path, case=case: check(path, case),
    )
    for path in dict.fromkeys((*SINGLE, *PAIR, *FURTHER))
    for name, case in cases_of(path).items()
}
