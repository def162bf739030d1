"""What Accelerate's launcher, or a script in its manner, asks for by environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.located import as_number
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.translate import SHORT_FIELDS
from zero_plugin.config.tree import Entry, Origin, OriginKind, Path, Tree
from zero_plugin.errors import ConfigError, Problem

__all__ = ["document_from_accelerate"]

_HERE: Final = "the environment"
_ON: Final = ("1", "true", "yes", "on", "y", "t")
_OFF: Final = ("0", "false", "no", "off", "n", "f")
_ZERO: Final = "ACCELERATE_DEEPSPEED_"

# Launch keys, by variable; `no` and `false` are what Accelerate's launcher exports where nothing was asked for.
_LAUNCH: Final = {"ACCELERATE_MIXED_PRECISION": "mixed_precision", "ACCELERATE_USE_CPU": "use_cpu"}
_TRAINING: Final = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}
_DEEPSPEED: Final = {
    f"{_ZERO}CONFIG_FILE": "deepspeed_config_file",
    f"{_ZERO}ZERO_STAGE": "zero_stage",
    f"{_ZERO}OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    f"{_ZERO}OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    f"{_ZERO}OFFLOAD_PARAM_DEVICE": "offload_param_device",
    f"{_ZERO}OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    f"{_ZERO}ZERO3_INIT": "zero3_init_flag",
    f"{_ZERO}ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    f"{_ZERO}MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
}
_REFUSED: Final = {
    "ACCELERATE_USE_FSDP": "Launch with DeepSpeed and zero_stage 3, which shards the same states as FSDP's FULL_SHARD.",
    "ACCELERATE_USE_MEGATRON_LM": "Launch with DeepSpeed; tensor and pipeline parallelism are not supported.",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Launch without parallelism settings; only data parallelism is supported.",
}


def document_from_accelerate(environ: Mapping[str, str]) -> Document | None:
    """The document that `ACCELERATE_*` variables describe, at the precedence of launch flags; None where none does.

    Raises:
        ConfigError: a variable asks for what this package does not have, or DeepSpeed's file cannot be read.
    """
    refused = [
        Problem(_where(name), "", f"{environ[name]} is not supported", fix)
        for name, fix in _REFUSED.items()
        if environ.get(name, "").lower() in _ON
    ]
    if refused:
        raise ConfigError(refused)
    on_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _ON
    launch = {
        key: _read(value)
        for name, key in _LAUNCH.items()
        if (value := environ.get(name, "")).lower() not in ("", *_OFF)
    }
    wanted = {**_TRAINING, **_DEEPSPEED} if on_deepspeed else _TRAINING
    training = {
        key: _read(value) for name, key in wanted.items() if (value := environ.get(name, "")) not in ("", "none")
    }
    if not launch and not training and not on_deepspeed:
        return None
    asked: dict[str, Any] = {**launch, "deepspeed_config": training}
    if on_deepspeed:
        asked["distributed_type"] = "DEEPSPEED"
    document = document_from_mapping(asked, _HERE)
    names: dict[Path, str] = {(key,): name for name, key in {**_LAUNCH, **_DEEPSPEED}.items()}
    names[("distributed_type",)] = "ACCELERATE_USE_DEEPSPEED"
    of_training = {SHORT_FIELDS[key]: name for name, key in wanted.items() if key in SHORT_FIELDS}
    return replace(document, launch=_marked(document.launch, names), deepspeed=_marked(document.deepspeed, of_training))


def _marked(tree: Tree, names: Mapping[Path, str]) -> Tree:
    """`tree` with what the variables said marked as such, and the rest as what the file that one names says."""
    marked = {}
    for path, entry in tree.entries.items():
        if entry.origin.kind == "code":
            by_variable = entry.origin.where == _HERE
            kind: OriginKind = "flag" if by_variable else "file"
            where = _where(names[path]) if by_variable else entry.origin.where
            marked[path] = Entry(entry.value, Origin(kind, where))
    return tree.replace(marked)


def _where(name: str) -> str:
    return f"environment variable {name}"


def _read(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = as_number(text)
    return text if number is None else number
