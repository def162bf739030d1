"""The constants of `accelerate.utils.constants`: file names and words."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from zero_plugin.utils.lazy import stand_in

MODEL_NAME: Final = "pytorch_model"
WEIGHTS_NAME: Final = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME: Final = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME: Final = f"{WEIGHTS_NAME}.index.json"
SAFE_MODEL_NAME: Final = "model"
SAFE_WEIGHTS_NAME: Final = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME: Final = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = f"{SAFE_WEIGHTS_NAME}.index.json"
# Files of Accelerate's own checkpoints, which `Accelerator.load_state` does not read.
OPTIMIZER_NAME: Final = "optimizer"
SCHEDULER_NAME: Final = "scheduler"
SAMPLER_NAME: Final = "sampler"
SCALER_NAME: Final = "scaler.pt"
RNG_STATE_NAME: Final = "random_states"

PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

TORCH_DYNAMO_MODES: Final = ["default", "reduce-overhead", "max-autotune"]
STR_OPERATION_TO_FUNC: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
