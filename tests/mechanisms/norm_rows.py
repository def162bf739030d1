"""The norm of a step's gradients, and clipping by it."""

from __future__ import annotations

from rows import Row, checks, parity

ENGINES = ("zero0", "zero1", "zero2", "zero3", "zero2-cpu")
ENGINE = "strategies/deepspeed/session.py"
PLAIN = "strategies/torch_session.py"

ROWS = [
    Row(
        "the norm is this step's, on engines",
        ENGINE,
        "        norm = self._gradients.norm()\n        if measured",
        "        norm = torch.as_tensor(self.last_norm or 0.0, dtype=torch.float32)\n        if measured",
        checks("loop", "clip_returns_the_norm_before_clipping", *ENGINES),
        "instead of",
    ),
    Row(
        "the norm is of averaged gradients, on engines",
        "loop/window.py",
        "        self._complete()\n        self._measured = self.session.clip(",
        "        self._measured = self.session.clip(",
        checks("loop", "clip_returns_the_norm_before_clipping", "zero0", "zero1", "zero2"),
        "Error",
    ),
    Row(
        "the norm leaves out what sat out, at stage 3",
        "loop/window.py",
        "        self._complete()\n        self._measured = self.session.clip(",
        "        self._measured = self.session.clip(",
        parity("branch-single-steps", "zero3"),
        "norms: off by",
    ),
    Row(
        "the norm is this step's, off engines",
        PLAIN,
        "        return Measured(finite, norm)",
        "        return Measured(finite, torch.zeros(()))",
        checks("loop", "clip_returns_the_norm_before_clipping", "single", "ddp"),
        "instead of",
        processes=3,
    ),
    Row(
        "the step is clipped, on engines",
        ENGINE,
        "            self._gradients.set_clipping(limit)\n",
        "            pass\n",
        checks("loop", "clip_returns_the_norm_before_clipping", *ENGINES),
        "at limit 0.01",
    ),
    Row(
        "the limit is one step's, on engines",
        ENGINE,
        "        self._gradients.set_clipping(self._clipping)\n        self._gradients.begin_window()\n",
        "        self._gradients.begin_window()\n",
        checks("loop", "clip_returns_the_norm_before_clipping", *ENGINES),
        "the next step was clipped too",
    ),
    Row(
        "the step is clipped, off engines",
        PLAIN,
        "            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, by)",
        "            pass",
        checks("loop", "clip_returns_the_norm_before_clipping", "single", "ddp"),
        "at limit 0.01",
        processes=3,
    ),
    Row(
        "clipping inside a window does nothing",
        "loop/window.py",
        '        if not self.ends_here:\n            return torch.tensor(float("nan"))\n',
        "",
        checks("loop", "clip_inside_a_window_does_nothing", "ddp", "zero2"),
        "math.isnan",
    ),
    Row(
        "a norm that partitions cannot tell",
        ENGINE,
        "        if only is not None:",
        "        if False:",
        checks("loop", "clip_refuses_what_partitions_cannot_tell", "zero0", "zero2", "zero3"),
        "DID NOT RAISE",
    ),
    Row(
        "a backward after clipping",
        "loop/window.py",
        "            else:\n                raise LoopError(self._describe_late_backward())",
        "            else:\n                pass",
        checks("loop", "backward_after_clip", "zero0", "zero2", "zero3"),
        "DID NOT RAISE",
    ),
    Row(
        "clipping after the step",
        "loop/window.py",
        '        if self.phase is Phase.APPLIED:\n            raise LoopError(\n                f"{call}',
        '        if False:\n            raise LoopError(\n                f"{call}',
        checks("mistake", "clipping_comes_too_late", "ddp", "zero2"),
        "before optimizer.step()",
    ),
    Row(
        "clipping in configuration and code agrees",
        "loop/training.py",
        "        self._refuse_other_clipping(max_norm)\n",
        "",
        checks("loop", "clipping_in_config_and_code_must_agree", "ddp", "zero2"),
        "DID NOT RAISE",
    ),
]
