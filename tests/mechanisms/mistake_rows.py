"""Mistakes of a loop that are named."""

from __future__ import annotations

from rows import Row, checks, joint_checks

ENGINE = "strategies/deepspeed/session.py"
PLAIN = "strategies/torch_session.py"

ROWS = [
    Row(
        "loss.backward() on a module of torch",
        PLAIN,
        "    def _refuse_direct(self, _: Tensor) -> None:\n        if not self._is_open:",
        "    def _refuse_direct(self, _: Tensor) -> None:\n        if False:",
        checks("gradient", "gradients_stay_to_be_looked_at_after_the_step", "single", "ddp"),
        "DID NOT RAISE",
        processes=3,
    ),
    Row(
        "loss.backward() of other parameters, before backward",
        PLAIN,
        "            elif self._has_strays():\n                raise LoopError(DIRECT_BACKWARD)",
        "            elif False:\n                raise LoopError(DIRECT_BACKWARD)",
        checks("gradient", "a_direct_backward_of_some_parameters", "single", "ddp"),
        "DID NOT RAISE",
        processes=3,
    ),
    Row(
        "loss.backward() of other parameters, before step",
        PLAIN,
        "            if not self._are_spent and self._has_strays():",
        "            if False:",
        checks("gradient", "a_direct_backward_of_some_parameters", "single", "ddp"),
        "DID NOT RAISE",
        processes=3,
    ),
    Row(
        "loss.backward() on an engine",
        ENGINE,
        "        if any(map(_is_reached, self._trained)):",
        "        if False:",
        checks("loop", "direct_backward_is_refused", "zero0", "zero1", "zero2", "zero3"),
        "accelerator.backward(loss)",
    ),
    Row(
        "model.backward() and model.step() of an engine",
        ENGINE,
        "        engine.backward, engine.step = _refuse_engine_backward, _refuse_engine_step\n",
        "",
        joint_checks("together", "what_prepare_refuses", "zero2"),
        "accelerator.backward(loss)",
    ),
    Row(
        "step() of the optimizer that was given",
        "strategies/step_guard.py",
        "        if not self.is_open:",
        "        if False:",
        checks("part", "the_given_optimizer_does_not_step", "single", "ddp", "zero2"),
        "DID NOT RAISE",
        processes=3,
    ),
    Row(
        "prepare twice",
        "facade/prepare.py",
        "        known = any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self._trainings)\n",
        "        known = False\n",
        checks("loop", "prepare_refuses", "ddp", "zero2"),
        "prepared already",
    ),
    Row(
        "an optimizer of another model",
        "pairing.py",
        "    if foreign := len(held) - counts[most]:",
        "    if foreign := 0:",
        checks("loop", "prepare_refuses", "ddp", "zero2"),
        "4 of 4 parameters",
    ),
    Row(
        "a module that was not prepared",
        "first_steps.py",
        "self._refuse_strangers([p for p in found if not any(id(p) in training.ids for training in trained)])",
        "pass",
        joint_checks("together", "what_is_not_prepared", "ddp", "zero2"),
        "DID NOT RAISE",
    ),
    Row(
        "a model loaded with device_map",
        "pairing.py",
        '    if len(places) > 1 or "disk" in places:',
        "    if False:",
        joint_checks("together", "what_prepare_refuses", "ddp", "zero2"),
        "device_map",
    ),
    Row(
        "a loop that expects backward to step",
        "first_steps.py",
        "        if self._said or asked or self._backwards",
        "        if True or self._said or asked or self._backwards",
        joint_checks("together", "a_loop_that_never_steps", "ddp", "zero2"),
        "optimizer.step() was never called",
    ),
    Row(
        "a layer unfrozen after its model's first steps",
        "first_steps.py",
        "        return bool(self._frozen) and any(p.requires_grad for p in self._frozen)",
        "        return False",
        checks("mistake", "a_layer_is_unfrozen", "ddp", "zero2"),
        "DID NOT RAISE",
    ),
    Row(
        "a failed backward is not applied, on engines",
        ENGINE,
        "        self.failed |= reached",
        "        pass",
        checks("failure", "a_failed_backward_is_not_applied", "zero2", "zero3"),
        'raised(LoopError, "failed", "optimizer.zero_grad()"',
    ),
    Row(
        "a failed backward is not applied, off engines",
        PLAIN,
        "        if reached and (self._has_gradients or self._has_strays()):\n            self._fail()",
        "        pass",
        checks("failure", "a_failed_backward_is_not_applied", "single", "ddp"),
        'raised(LoopError, "failed", "optimizer.zero_grad()"',
        processes=3,
    ),
]
