"""Refuse a second backward in a window if a hook of the script expects the accumulated gradient in `p.grad`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.events import Guard, Sampling


class HooksOnSums(Guard):
    """A guard that refuses a second backward before the step if the script has post-accumulate-grad hooks.

    Mistake: a hook of `register_post_accumulate_grad_hook`, which gets each micro-batch's gradient instead of the sum.
    Cost: none without such hooks.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._name = _names_with_hooks(session.module)[0]

    @classmethod
    def is_needed(cls, session: Any) -> bool:
        """Return whether the script has these hooks, at a stage that keeps gradients elsewhere."""
        return not session.steps_by_grad and bool(_names_with_hooks(session.module))

    def before_backward(self, loss: Tensor, *, is_first: bool) -> None:  # noqa: ARG002
        """Refuse the second backward of a window."""
        if not is_first:
            raise LoopError(
                f"a second backward before the step, but {self._name} of the {type(self.session.module).__name__} has "
                "a hook of register_post_accumulate_grad_hook(). The hook expects the accumulated gradient in p.grad, "
                "but this ZeRO stage keeps it elsewhere.\nChange each backward's gradient by p.register_hook(lambda "
                "gradient: …), step after each backward, or train without ZeRO."
            )


def _names_with_hooks(module: nn.Module) -> list[str]:
    """Return the names of parameters with a post-accumulate-grad hook of the script, in addition to DeepSpeed's."""
    hooks = ((name, getattr(p, "_post_accumulate_grad_hooks", None)) for name, p in module.named_parameters())
    return [name for name, own in hooks if own is not None and len(own) > 1]
