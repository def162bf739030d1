"""`LossScaler`: the loss scale of fp16, as scripts see it in `Accelerator.scaler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_plugin.errors import LoopError
from zero_plugin.loop import clip
from zero_plugin.loop.prepared import Prepared
from zero_plugin.strategies.base import Session


class LossScaler:
    """The loss scale of fp16 with the methods of `torch.amp.GradScaler`, except `scale`, `step` and `update`.

    `Accelerator.backward` and the optimizer's `step` scale the loss, unscale the gradients and update the scale.

    Args:
        prepared: the prepared objects.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def unscale_(self, optimizer: Any) -> None:
        """Divide the next step's gradients of a prepared optimizer by the loss scale."""
        clip.unscale(self._prepared, optimizer, call="accelerator.scaler.unscale_()")

    def is_enabled(self) -> bool:
        """Return True: without fp16 no scaler exists."""
        return True

    def get_scale(self) -> float:
        """Return the factor on the loss.

        Raises:
            LoopError: no model is prepared with an optimizer.
        """
        return self._first().loss_scale

    def state_dict(self) -> dict[str, float]:
        """Return the state of the loss scale; `save_state` saves it too.

        Raises:
            LoopError: no model is prepared with an optimizer.
        """
        return self._first().scale_state()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Load a `state_dict` into every prepared model."""
        for training in self._prepared.trained:
            training.session.restore_scale(state_dict)

    def _first(self) -> Session:
        if not self._prepared.trained:
            raise LoopError(
                "accelerator.scaler: no loss scale exists before a model is prepared with an optimizer. Call "
                "prepare(model, optimizer) first."
            )
        return self._prepared.trained[0].session
