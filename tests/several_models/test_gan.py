"""A GAN on every path trains as in plain single-process torch."""

from __future__ import annotations

import torch
from gan import Case, train, train_plain
from on_paths import ALL, on_rows, row
from paths import FURTHER, assert_near, running, weights

# No path excludes any of these, so every feature is tested on every path.
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


def cases_of(path: str) -> dict[str, Case]:
    """List the cases of a path."""
    if path in FURTHER:
        return {name: EVERYWHERE[name] for name in ("left-gradients", "frozen")}
    return EVERYWHERE | (ON_SOME if path in SOME else {})


_CASES = EVERYWHERE | ON_SOME
# Daily each case runs on one device, on DDP or both, and on one or two stages; `make campaign` runs the rest.
_DAILY = {
    "single": tuple(EVERYWHERE),
    "ddp": ("bf16", *ON_SOME),
    "zero0": ("bf16",),
    "zero1": ("left-gradients-at-the-end",),
    "zero2": ("by-hand", "frozen", "short-window", "steps-at-the-end"),
    "zero3": ("left-gradients", "contexts"),
    "zero2-cpu": ("context", "short-window-in-context"),
    "zero3-cpu": ("left-gradients",),
}
_ROWS = [
    row(
        path.removesuffix("-one-process"),
        1 if path in ("single", "zero2-one-process") else 2,
        name,
        daily=name in _DAILY.get(path, ()),
    )
    for path in ALL
    for name in cases_of(path)
]


@on_rows(("name",), _ROWS)
def test_gan(path: str, name: str) -> None:
    """Losses, norms and the weights of both models are those of plain torch on the global batch."""
    case = _CASES[name]
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
