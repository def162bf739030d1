"""Gradients that are dropped, and steps that are skipped."""

from __future__ import annotations

from rows import Row, checks, parity

ENGINES = ("zero0", "zero1", "zero2", "zero3", "zero2-cpu")
GRADIENTS = "strategies/deepspeed/gradients.py"
ENGINE = "strategies/deepspeed/session.py"
PLAIN = "strategies/torch_session.py"

ROWS = [
    Row(
        "zero_grad drops what came before the step",
        "optimizer.py",
        "            self.session.drop_gradients()\n            self._corrected = False\n",
        "            self._corrected = False\n",
        parity("dropped", "single", "ddp", "zero2", "zero3"),
        "off by",
        processes=3,
    ),
    Row(
        "a dropped window begins anew",
        "optimizer.py",
        "            self._window.restart()\n",
        "",
        checks("failure", "a_failed_backward_ends_its_window", "ddp", "zero2"),
        "Error",
    ),
    Row(
        "dropping off engines",
        PLAIN,
        "        self.optimizer.zero_grad(set_to_none=True)\n",
        "",
        parity("dropped", "single", "ddp"),
        "off by",
        processes=3,
    ),
    Row(
        "dropping at stage 0",
        GRADIENTS,
        "        for p in self._parameters:\n            p.grad = None\n",
        "        pass\n",
        parity("dropped", "zero0"),
        "off by",
    ),
    Row(
        "dropping at stage 1 in bf16",
        GRADIENTS,
        "        self._wrapper.zero_grad(set_to_none=True)\n",
        "        pass\n",
        parity("bf16-dropped", "zero1"),
        "off by",
    ),
    Row(
        "dropping at stage 1",
        GRADIENTS,
        "        wrapper.zero_grad(set_to_none=True)\n        for buffers",
        "        for buffers",
        parity("dropped", "zero1"),
        "off by",
    ),
    Row(
        "dropping at stage 2",
        GRADIENTS,
        "                buffers[group] = None\n",
        "                pass\n",
        parity("dropped", "zero2"),
        "off by",
    ),
    Row(
        "dropping at stage 2 in bf16",
        GRADIENTS,
        "        for buffers in (wrapper.averaged_gradients, wrapper.all_grad_tensors):",
        "        for buffers in (wrapper.all_grad_tensors,):",
        parity("bf16-dropped", "zero2"),
        "off by",
    ),
    Row(
        "dropping at stage 2 with offload",
        GRADIENTS,
        "        wrapper.micro_step_id = -1\n        if wrapper.cpu_offload:\n            wrapper._offload",
        "        if wrapper.cpu_offload:\n            wrapper._offload",
        parity("dropped", "zero2-cpu"),
        "off by",
    ),
    Row(
        "dropping at stage 3",
        GRADIENTS,
        "        self._wrapper.micro_step_id = micro_batch\n",
        "",
        parity("dropped", "zero3"),
        "off by",
    ),
    Row(
        "a step that is not finite is skipped, off engines",
        PLAIN,
        "self._finite = not self._skips or all_finite(self._gradients())",
        "self._finite = True",
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "single", "ddp"),
        "optimizer.step_was_skipped",
        processes=3,
    ),
    Row(
        "a step that is not finite is skipped, at stage 0 in fp32",
        ENGINE,
        "        if self.engine.optimizer is self.optimizer and not self._gradients.are_finite():",
        "        if False:",
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "zero0"),
        "optimizer.step_was_skipped",
    ),
    Row(
        "a step that is not finite is skipped, in bf16",
        "resolve/precision.py",
        'draft.put(("bf16", "check_grad_overflow"), True,',
        'draft.put(("bf16", "check_grad_overflow"), False,',
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "zero2", "zero3"),
        "optimizer.step_was_skipped",
    ),
    Row(
        "what was skipped is not added to the next step",
        ENGINE,
        "            self._gradients.drop()  # stage 2 with offload",
        "            pass  # stage 2 with offload",
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "zero2-cpu"),
        "assert",
    ),
    Row(
        "a skipped step leaves the schedule",
        "scheduler.py",
        "            if stays:\n                return\n",
        "",
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "ddp", "zero2")
        + checks("schedule", "schedule_waits_for_the_window", "ddp", "zero2"),
        '["lr"]',
    ),
    Row(
        "the run stops after many skips",
        "optimizer.py",
        "        if self.skipped_in_a_row >= self.session.most_skips:",
        "        if False:",
        checks("nonfinite", "the_run_stops_after_many_skips", "ddp", "zero2", "zero3"),
        "DID NOT RAISE",
    ),
    Row(
        "skips in a row are counted from the last applied step",
        "optimizer.py",
        "        self.skipped_in_a_row = 0\n        self.applied_steps += 1\n",
        "        self.applied_steps += 1\n",
        checks("nonfinite", "a_step_that_is_not_finite_is_skipped", "ddp", "zero2"),
        "optimizer.skipped_in_a_row == 0",
    ),
    Row(
        "the first parameter that is not finite is named",
        "optimizer.py",
        "        last_chance = self.skipped_in_a_row + 1 == self.session.most_skips",
        "        last_chance = False",
        checks("nonfinite", "the_run_stops_after_many_skips", "ddp", "zero2", "zero3"),
        "bad.weight",
    ),
    Row(
        "the first parameter that is not finite is found on engines",
        "strategies/deepspeed/nonfinite.py",
        "                return str(name)",
        "                return None",
        checks("nonfinite", "the_run_stops_after_many_skips", *ENGINES),
        "bad.weight",
    ),
]
