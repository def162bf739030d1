"""The output that a run prints without being asked."""

from __future__ import annotations

import contextlib
import io

from on_paths import LOOP, on_paths
from paths import loss_of, net_and_sgd, own_batch, running


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_the_output_is_the_scripts(path: str) -> None:
    """Nothing goes to stdout, in bf16 neither. Every line on stderr names its source."""
    for precision in ("no", "bf16"):
        printed, said = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(said),
            running(path, mixed_precision=precision) as accelerator,
        ):
            model, optimizer = accelerator.prepare(*net_and_sgd())
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
        assert printed.getvalue() == ""
        assert all(line.startswith("zero_plugin: ") for line in said.getvalue().splitlines()), said.getvalue()
