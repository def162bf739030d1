"""The part of a configuration that the self-test runs by: processes, precision, stage and offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zero_plugin.config.document import Document

__all__ = ["document_of_test"]

# The rest is about the user's loop (its batches, schedule and clipping) or writes elsewhere (monitors, profilers).
_KEPT: Final = (
    "zero_optimization",
    "bf16",
    "fp16",
    "aio",
    "data_types",
    "torch_autocast",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "zero_force_ds_cpu_optimizer",
)
_LEFT_OUT: Final = ("dynamo_config", "main_training_function", "max_restarts", "min_machines", "log_dir", "tee")


def document_of_test(document: Document) -> Document:
    """What of a document the self-test's own loop runs by.

    Of the optimizer only the type stays, where it is an Adam: the check compares a step, and a sign (Lion) or a first
    step divided by its own size (Adagrad) would hide a wrong gradient.
    """
    training = document.deepspeed.where(lambda path, _: path[0] in _KEPT)
    kind = document.deepspeed.get("optimizer", "type")
    if kind is not None and str(kind.value).lower() in ("adam", "adamw"):
        training = training.replace({("optimizer", "type"): kind})
    launch = document.launch.where(lambda path, _: path[0] not in _LEFT_OUT)
    return replace(document, launch=launch, deepspeed=training, notes=())
