"""The factor on the loss under fp16, by the rule of DeepSpeed's ZeRO, so that every path sees the same scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULT_MOST_SKIPS", "LossScale", "most_skips"]


def most_skips(initial: float, smallest: float, hysteresis: int, backoff: float = 0.5) -> int:
    """After how many skipped steps in a row a run stops: a scale would have come down from its start to its smallest.

    The first `hysteresis` - 1 skips leave the scale alone, the next log2(initial / smallest) halve it, and one more
    says that the scale was not the cause.
    """
    halvings = 0
    while initial > smallest:
        initial *= backoff
        halvings += 1
    return halvings + max(1, hysteresis)


# 18: with the `fp16` section's defaults. It holds too where no scale can be lowered: fp32, bf16, a fixed scale.
DEFAULT_MOST_SKIPS = most_skips(2.0**16, 1.0, 2)


class LossScale:
    """Lowered at a skipped step, raised after a number of good ones; the keys are those of the `fp16` section.

    Args:
        section: `loss_scale` (0: dynamic, else fixed), `initial_scale_power`, `loss_scale_window`, `hysteresis`,
            `consecutive_hysteresis`, `min_loss_scale`; what is absent takes DeepSpeed's default.
        growth, backoff: the factors; DeepSpeed has these alone.

    Attributes:
        value: the factor.
        most_skips: see the function.
    """

    def __init__(self, section: Mapping[str, Any], growth: float = 2.0, backoff: float = 0.5) -> None:
        self._growth = growth
        self._backoff = backoff
        fixed = float(section.get("loss_scale") or 0.0)
        self._dynamic = fixed == 0.0
        self._window = int(section.get("loss_scale_window", 1000))
        self._hysteresis = max(1, int(section.get("hysteresis", 2)))
        self._refills = bool(section.get("consecutive_hysteresis", False))
        self._smallest = float(section.get("min_loss_scale", 1))
        self._patience = self._hysteresis  # skips left until the scale is halved, this one included
        self._good = 0  # steps applied since the last skip
        self.value = 2.0 ** int(section.get("initial_scale_power", 16)) if self._dynamic else fixed
        self.most_skips = (
            most_skips(self.value, self._smallest, self._hysteresis, backoff) if self._dynamic else DEFAULT_MOST_SKIPS
        )

    def update(self, *, skipped: bool) -> None:
        """Count one step."""
        if not self._dynamic:
            return
        if skipped:
            self._good = 0
            if self._patience > 1:
                self._patience -= 1
            else:
                self.value = max(self.value * self._backoff, self._smallest)
            return
        grows = self._good > 0 and self._good % self._window == 0
        if self._refills or grows:
            self._patience = self._hysteresis
        if grows:
            self.value *= self._growth
        self._good += 1

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps: the factor, good steps since the last skip, and skips left until it is halved."""
        return {"value": self.value, "good_steps": self._good, "patience": self._patience}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a `state`; a fixed scale stays what the configuration says."""
        if self._dynamic:
            self.value, self._good = float(state["value"]), int(state["good_steps"])
            self._patience = int(state["patience"])
