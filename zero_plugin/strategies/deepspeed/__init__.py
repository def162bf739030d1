"""ZeRO 0-3 through the DeepSpeed engine; the only folder that imports deepspeed."""

import logging
import os

from zero_plugin.config.installed import NEWER_DEEPSPEED, refuse_deepspeed, warn_of_deepspeed
from zero_plugin.errors import MachineError

if refusal := refuse_deepspeed():
    raise MachineError(f"{refusal}. {NEWER_DEEPSPEED}.")
if (warning := warn_of_deepspeed()) and os.environ.get("RANK", "0") == "0":
    logging.getLogger(__name__).warning(warning)
