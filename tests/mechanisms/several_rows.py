"""Several models under one Accelerator."""

from __future__ import annotations

from rows import Row, joint_checks

GRADIENTS = "strategies/deepspeed/gradients.py"
ENGINE = "strategies/deepspeed/session.py"
PLAIN = "strategies/torch_session.py"

ROWS = [
    Row(
        "a backward goes to the models that it reaches",
        "loop/training_loop.py",
        "        training.window.close_backward(reached=training.reached)",
        "        training.window.close_backward(reached=True)",
        joint_checks("together", "clipping_is_of_one_model", "zero0", "zero2", "zero3"),
        "Error",
    ),
    Row(
        "nothing is reduced where no gradient came",
        ENGINE,
        'engine.__dict__["inside_no_sync_ctxt"] = not reached',
        "pass",
        joint_checks("gan", "frozen", "zero2"),
        "Error",
    ),
    Row(
        "a loss that runs through is no micro-batch",
        "loop/training_loop.py",
        "        if not named or training.window.in_context:",
        "        if True:",
        ("tests/test_backward.py::test_another_models_loss_is_no_micro_batch",),
        "assert",
        processes=0,
    ),
    Row(
        "a model frozen for another's loss is stepped whole",
        ENGINE,
        "        frozen = [p for p in self._trained if not p.requires_grad]",
        "        frozen: list[Tensor] = []",
        joint_checks("gan", "steps-at-the-end", "zero2-cpu"),
        "Error",
    ),
    Row(
        "a model frozen for another's loss is clipped whole",
        "loop/training.py",
        "        stepped: Sequence[nn.Parameter] = self.parameters\n",
        "        stepped = [p for p in self.parameters if p.requires_grad]\n",
        joint_checks("gan", "steps-at-the-end", "single", "ddp", "zero2"),
        "clip_grad_norm_ got parameters of no prepared model",
        processes=3,
    ),
    Row(
        "DDP reduces what several forwards came before",
        "strategies/ddp_reducer.py",
        "        if not self._is_ready or finds_unused:",
        "        if False:",
        joint_checks("together", "forwards_before_backwards", "ddp"),
        "off by",
    ),
    Row(
        "a backward counts before the next forward, at stage 3",
        GRADIENTS,
        "        self._wrapper.micro_step_id = 0 if is_first else 1\n",
        "",
        joint_checks("together", "forwards_before_backwards", "zero3"),
        "off by",
    ),
    Row(
        "a window has one owner by hand",
        "loop/training_loop.py",
        "    if not named and steps > 1 and len(reached) > 1:",
        "    if False:",
        joint_checks("together", "whose_micro_batch", "ddp", "zero2"),
        "DID NOT RAISE",
    ),
    Row(
        "a loss is divided by the window of the models that accumulate() names",
        "loop/training_loop.py",
        "share_divisor(named or [training.window for training in trainings])",
        "trainings[0].window.steps",
        joint_checks("together", "gradients_of_another_window", "ddp", "zero2"),
        "off by",
    ),
    Row(
        "one loss has one scale",
        "loop/training_loop.py",
        "    _share_loss_scale(trainings)\n    named",
        "    named",
        joint_checks("together", "an_overflow_of_one_model", "ddp"),
        "loss_scale",
    ),
    Row(
        "what came before another scale is rescaled, on engines",
        ENGINE,
        "            self.scale_gradients(scale / wrapper.loss_scale)",
        "            pass",
        joint_checks("together", "a_loss_scale_changes_inside_a_window", "zero1", "zero2", "zero3"),
        "off by",
    ),
    Row(
        "what came before another scale is rescaled, off engines",
        PLAIN,
        "            self.scale_gradients(scale / self._scale.value)",
        "            pass",
        joint_checks("together", "a_loss_scale_changes_inside_a_window", "ddp"),
        "off by",
    ),
    Row(
        "a gradient of gradients at stage 3",
        ENGINE,
        "        elif torch.is_grad_enabled() and self.engine.zero_optimization_partition_weights():",
        "        elif False:",
        joint_checks("together", "gradient_penalty", "zero3"),
        "create_graph=True",
    ),
    Row(
        "a model without an optimizer stays partitioned",
        "loop/training_loop.py",
        "        training.session.close_backward(reached=False)",
        "        pass",
        joint_checks("together", "a_frozen_judge_passes_gradients_on", "zero3"),
        "still active in submodules",
    ),
    Row(
        "each model has its own configuration",
        "loop/prepare.py",
        "replace(facts, model=probe_model(model))",
        "replace(facts, model=None)",
        joint_checks("together", "each_model_has_its_own_configuration", "zero2"),
        "buckets",
    ),
    Row(
        "clipping is of one model",
        "loop/training_loop.py",
        "            if len(owners) > 1:",
        "            if False:",
        joint_checks("together", "clipping_is_of_one_model", "ddp", "zero2"),
        "DID NOT RAISE",
    ),
]
