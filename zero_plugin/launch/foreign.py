"""The variables by which scripts built on Accelerate or transformers' Trainer learn what the configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from zero_plugin.config.compiler_keys import asked_compiler
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_deepspeed
from zero_plugin.config.tree import AUTO, Path
from zero_plugin.launch.spec import Setting
from zero_plugin.resolve.resolved import PLACEMENT, Resolved

__all__ = ["CONFIG_FILE_VARIABLE", "foreign_variables", "overridden"]

CONFIG_FILE_VARIABLE: Final = "ACCELERATE_DEEPSPEED_CONFIG_FILE"

_ZERO: Final = "zero_optimization"
# What the environment may hold of an earlier launch, and what turns it off: how a run is split is never left open.
_OFF: Final[Mapping[str, str]] = {
    **{
        f"ACCELERATE_USE_{what}": "false"
        for what in ("CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")
    },
    "ACCELERATE_CONFIG_DS_FIELDS": "",
}


def foreign_variables(
    document: Document, settings: LaunchSettings, resolved: Resolved, environ: Mapping[str, str], *, on_cpu: bool
) -> dict[str, Setting]:
    """What Accelerate 1.15 and transformers 5.23 read, as far as the configuration says it; what it leaves open stays.

    Args:
        document: what was asked for.
        settings: its launch part.
        resolved: the same, resolved as far as it can be before a run.
        environ: this process's environment.
        on_cpu: whether the run is on the CPU.
    """
    found = dict(_of_any_run(document, settings, resolved))
    if asks_for_deepspeed(document, settings):
        found.update(_of_zero(document, settings, resolved))
    elif on_cpu:  # beside ZeRO, Accelerate would take it for a run without
        found["ACCELERATE_USE_CPU"] = Setting("true", "the run is on the CPU")
    for name, off in _OFF.items():
        if name not in found and environ.get(name, off).lower() not in ("", "0", off):
            found[name] = Setting(off, "not what the configuration asks for")
    return found


def overridden(added: Mapping[str, Setting], environ: Mapping[str, str]) -> list[str]:
    """A sentence for each of Accelerate's variables that the environment holds otherwise than the configuration."""
    return [
        f"{name}={environ[name]}, from your environment, gives way to {setting.value or 'nothing'}: {setting.reason}"
        for name, setting in added.items()
        if name.startswith("ACCELERATE_") and environ.get(name, setting.value) != setting.value
    ]


def _of_any_run(document: Document, settings: LaunchSettings, resolved: Resolved) -> Iterator[tuple[str, Setting]]:
    if resolved.precision != "no" or document.launch.value("mixed_precision") is not None:
        entry = resolved.launch.entries[("mixed_precision",)]
        yield "ACCELERATE_MIXED_PRECISION", Setting(resolved.precision, str(entry.origin))
    yield from _typed(document, ("gradient_accumulation_steps",), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    for name, entry in asked_compiler(document.launch).items():
        yield f"ACCELERATE_DYNAMO_{name.upper()}", Setting(_text(entry.value), str(entry.origin))
    if settings.debug:
        yield "ACCELERATE_DEBUG_MODE", Setting("true", _launch_origin(document, "debug"))


def _of_zero(document: Document, settings: LaunchSettings, resolved: Resolved) -> Iterator[tuple[str, Setting]]:
    prefix = "ACCELERATE_DEEPSPEED_"
    yield "ACCELERATE_USE_DEEPSPEED", Setting("true", "the configuration asks for ZeRO")
    stage = resolved.tree.entries[(_ZERO, "stage")]
    if any(path in resolved.missing for path in PLACEMENT):  # such a script stops at that value, and must
        why = "the plan waits for the model: a script that is built on Accelerate needs --model at the launch"
        yield f"{prefix}ZERO_STAGE", Setting("auto", why)
        return
    yield f"{prefix}ZERO_STAGE", Setting(str(stage.value), str(stage.origin))
    yield from _typed(document, ("gradient_clipping",), "ACCELERATE_GRADIENT_CLIPPING")
    for what in ("optimizer", "param"):
        section = (_ZERO, f"offload_{what}")
        name = f"{prefix}OFFLOAD_{what.upper()}"
        yield from _typed(document, (*section, "device"), f"{name}_DEVICE")
        if document.deepspeed.value(*section, "device") == "nvme":  # Accelerate's own launcher loses the folder
            yield from _typed(document, (*section, "nvme_path"), f"{name}_NVME_PATH")
    if resolved.zero_stage == 3:
        partitioned = settings.zero3_init_flag is not False
        yield f"{prefix}ZERO3_INIT", Setting(str(partitioned).lower(), _launch_origin(document, "zero3_init_flag"))
        saved = (_ZERO, "stage3_gather_16bit_weights_on_model_save")
        yield from _typed(document, saved, f"{prefix}ZERO3_SAVE_16BIT_MODEL")
    if settings.deepspeed_moe_layer_cls_names:
        names = ",".join(settings.deepspeed_moe_layer_cls_names)
        yield f"{prefix}MOE_LAYER_CLS_NAMES", Setting(names, _launch_origin(document, "deepspeed_moe_layer_cls_names"))


def _typed(document: Document, path: Path, name: str) -> Iterator[tuple[str, Setting]]:
    """A training key that holds a value; what is open is the script's."""
    entry = document.deepspeed.get(*path)
    if entry is not None and entry.value is not None and entry.value is not AUTO:
        yield name, Setting(_text(entry.value), str(entry.origin))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _launch_origin(document: Document, key: str) -> str:
    entry = document.launch.get(key)
    return "its default" if entry is None else str(entry.origin)
