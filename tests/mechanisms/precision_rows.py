"""Types of inputs and outputs, and the loss scale."""

from __future__ import annotations

from rows import Row, checks, joint_checks, parity

ENGINE = "strategies/deepspeed/session.py"
PLAIN = "strategies/torch_session.py"

ROWS = [
    Row(
        "floating inputs come in the engine's type",
        "strategies/precision.py",
        "    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)\n",
        "",
        checks("precision", "types_in_and_out", "zero0", "zero2", "zero3"),
        "dtype",
    ),
    Row(
        "integers are never cast",
        "strategies/precision.py",
        "if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf",
        "if isinstance(leaf, Tensor) else leaf",
        checks("precision", "types_in_and_out", "zero0", "zero2", "zero3"),
        'seen["tokens"]',
    ),
    Row(
        "floating outputs leave in fp32",
        "strategies/precision.py",
        "    model.register_forward_hook(lambda _module, _inputs, outputs: map_leaves(to_fp32, outputs))\n",
        "",
        checks("precision", "types_in_and_out", "zero0", "zero2", "zero3"),
        'out["y"].dtype',
    ),
    Row(
        "a buffer of another type is named",
        "strategies/precision.py",
        "    if wide:\n",
        "    if False:\n",
        checks("precision", "floating_buffers", "zero2"),
        "RuntimeError",
    ),
    Row(
        "the step that stage 0 takes in 16 bits is undone",
        "strategies/deepspeed/strategy.py",
        "            _undo_first_step(engine)\n",
        "            pass\n",
        parity("bf16", "zero0"),
        "off by",
    ),
    Row(
        "the loss is scaled off engines",
        PLAIN,
        "return loss if self._scale is None else loss.float() * self._scale.value",
        "return loss",
        parity("fp16-skipped", "single", "ddp"),
        "off by",
        processes=3,
    ),
    Row(
        "the loss is scaled on engines",
        ENGINE,
        "            scaled: Tensor = self.engine.optimizer.scale_if_loss(loss)",
        "            scaled: Tensor = loss",
        joint_checks("together", "a_loss_scale_changes_inside_a_window", "zero1", "zero2", "zero3"),
        "off by",
    ),
    Row(
        "the scale is taken out before clipping",
        PLAIN,
        "return Measured(all_finite(self._gradients(), 1.0 / self._scale.value, before_reading=self._run_recorded))",
        "return Measured()",
        parity("fp16-skipped", "single", "ddp"),
        "off by",
        processes=3,
    ),
    Row(
        "the scale falls at a skipped step",
        "strategies/precision.py",
        "                self.value = max(self.value * self._backoff, self._smallest)",
        "                pass",
        parity("fp16-skipped", "single", "ddp"),
        "loss scales: off by",
        processes=3,
    ),
    Row(
        "the scale rises after good steps",
        "strategies/precision.py",
        "            self.value *= self._growth",
        "            pass",
        parity("fp16", "single", "ddp"),
        "loss scales: off by",
        processes=3,
    ),
    Row(
        "bf16 off engines",
        PLAIN,
        '        if precision != "no":\n            device',
        "        if False:\n            device",
        checks("precision", "types_in_and_out", "single", "ddp"),
        'seen["y"]',
        processes=3,
    ),
]
