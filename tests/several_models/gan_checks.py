"""A GAN on every path trains as in plain single-process torch."""

from __future__ import annotations

import torch
from gan import Case, train, train_plain
from paths import PAIR, SINGLE, assert_near, running, weights

CASES = {
    "by-hand": Case(frozen=False),
    "frozen": Case(frozen=True, one_call=True, adam=True),
    "clipped": Case(frozen=False, clip=0.3, one_call=True, adam=True),
    "context": Case(frozen=True, accumulation=2, style="context", clip=0.2),
    "left-gradients": Case(frozen=False, accumulation=2, style="context", clip=0.2, one_call=True),
    "contexts": Case(frozen=False, accumulation=2, style="contexts"),
    "short-window": Case(frozen=True, accumulation=2, batches=5),
    "short-window-in-context": Case(frozen=False, accumulation=3, batches=4, style="context", one_call=True),
    "steps-at-the-end": Case(frozen=True, late=True, clip=0.3),
    "left-gradients-at-the-end": Case(frozen=False, late=True),
}


def check(path: str, case: Case) -> None:
    """Losses, norms and the weights of both models."""
    wanted = train_plain(case)
    with running(path, gradient_accumulation_steps=case.accumulation) as accelerator:
        found = train(accelerator, case, weights)
    assert len(found.norms) == len(wanted.norms)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(wanted.norms), atol=1e-5, rtol=1e-5)
    for got, expected in zip(found.weights, wanted.weights, strict=True):
        assert_near(got, expected)


CHECKS = {
    f"{path}-{name}": (
        [count for count, known in ((1, SINGLE), (2, PAIR)) if path in known],
        lambda folder, path=path, case=case: check(path, case),
    )
    for path in dict.fromkeys((*SINGLE, *PAIR))
    for name, case in CASES.items()
}
