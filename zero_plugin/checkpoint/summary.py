"""Summaries of checkpoints, and recognition of folders, from small files alone and without torch.

A folder may hold one checkpoint, several, a checkpoint of another library, or a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from zero_plugin.checkpoint.folders import numbered_checkpoints, split_number
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredModel, read_manifest
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.config.run_files import RECORD_NAME
from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.safetensors_files import Place, read_json

_WEIGHT: Final = "weight"
_FLOATS: Final = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}

Kind = Literal["checkpoint", "several", "deepspeed", "deepspeed_universal", "model", "pickled_model", "adapter"]

KINDS: Final = {
    "checkpoint": "a checkpoint of save_state",
    "several": "a folder of several such",
    "deepspeed": "a checkpoint of DeepSpeed's save_checkpoint",
    "deepspeed_universal": "a universal checkpoint of DeepSpeed",
    "model": "a Hugging Face model folder",
    "pickled_model": "a model folder whose weights are pickles",
    "adapter": "a PEFT adapter",
}
_MODEL_STATES: Final = "*_model_states.pt"


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All tensors of one kind: `weight`, `master`, or one of the optimizer's states.

    Attributes:
        kind: the kind.
        tensors: the number of tensors.
        bytes: their total size.
        types: safetensors' names of their dtypes.
    """

    kind: str
    tensors: int
    bytes: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The summary of one model in a checkpoint.

    Attributes:
        kind: name of the model's class.
        folder: its folder relative to the checkpoint's.
        trained: elements of the parameters that the optimizer steps.
        frozen: elements of all other weights and buffers.
        tied: number of further names of shared weights.
        algorithm: the optimizer's algorithm; None without an optimizer or if unknown.
        kinds: the stored tensors of each kind.
    """

    kind: str
    folder: str
    trained: int
    frozen: int
    tied: int
    algorithm: str | None
    kinds: tuple[KindSummary, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one checkpoint.

    Attributes:
        folder: the checkpoint's folder.
        damage: why it is incomplete; None if it is complete. For a damaged checkpoint, the rest may be missing.
        step: optimizer steps that the first model had taken.
        bytes: the size of all files.
        precision: the precision of the training, or that of most weights if it was not recorded.
        topology: the run that wrote it, as far as known: `strategy`, `zero_stage`, `optimizer_on` and `parameters_on`
            (if offloaded), `processes`, `run` (its id), and `imported_from`.
        created: time of creation, as ISO 8601.
        versions: package → version.
        models: the models in the order of `prepare`.
        files: path → bytes.
    """

    folder: Path
    damage: str | None
    step: int | None = None
    bytes: int = 0
    precision: str | None = None
    topology: Mapping[str, Any] = field(default_factory=dict)
    created: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    models: tuple[ModelSummary, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)


def summarise(folder: Path) -> Summary:
    """Summarise a checkpoint. For a damaged one, give the parts that can be read.

    Args:
        folder: the folder of one checkpoint.
    """
    damage = find_damage(folder)
    try:
        manifest = read_manifest(folder)
        records = read_json(folder / "training.json")["models"]
    except (CheckpointError, KeyError, TypeError) as error:
        return Summary(folder, damage or str(error))
    optimizers = [record["optimizer"] or {} for record in records]
    files = {path: size for path, (size, _) in manifest.files.items()}
    run = read_json(folder / RECORD_NAME) if (folder / RECORD_NAME).is_file() else {}
    values = {entry["path"]: entry["value"] for entry in run.get("values", ())}
    return Summary(
        folder,
        damage,
        step=next((optimizer["applied_steps"] for optimizer in optimizers if optimizer), None),
        bytes=sum(files.values()) + (folder / MANIFEST_NAME).stat().st_size,
        precision=_precision(values.get("mixed_precision"), manifest),
        topology=_topology(manifest, run.get("deepspeed_config") or {}),
        created=manifest.about.get("created"),
        versions=manifest.about.get("versions") or {},
        models=tuple(map(_summarise_model, manifest.models, optimizers)),
        files=files,
    )


def _summarise_model(model: StoredModel, optimizer: Mapping[str, Any]) -> ModelSummary:
    stepped = {name for group in optimizer.get("groups", ()) for name in group["params"]}
    weights = {name: math.prod(place.shape) for (kind, name), place in model.places.items() if kind == _WEIGHT}
    trained = sum(count for name, count in weights.items() if name in stepped)
    kinds: dict[str, list[Place]] = {}
    for (kind, _), place in model.places.items():
        kinds.setdefault(kind, []).append(place)
    summaries = tuple(
        KindSummary(kind, len(places), sum(p.size for p in places), tuple(sorted({p.type_name for p in places})))
        for kind, places in kinds.items()
    )
    frozen, algorithm = sum(weights.values()) - trained, optimizer.get("algorithm")
    return ModelSummary(model.kind, model.folder, trained, frozen, len(model.tied), algorithm, summaries)


def _precision(recorded: str | None, manifest: Manifest) -> str | None:
    if recorded is not None:
        return "fp32" if recorded == "no" else recorded
    sizes = dict.fromkeys(_FLOATS, 0)
    for model in manifest.models:
        for (kind, _), place in model.places.items():
            if kind == _WEIGHT and place.type_name in sizes:
                sizes[place.type_name] += place.size
    return _FLOATS[max(sizes, key=lambda name: sizes[name])] if any(sizes.values()) else None


def _topology(manifest: Manifest, deepspeed_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `topology` of a `Summary`: facts about the run that wrote the checkpoint."""
    about = manifest.about
    zero = deepspeed_config.get("zero_optimization") or {}
    imported = about.get("imported") or {}
    found = {
        "imported_from": imported.get("format"),
        "strategy": about.get("strategy"),
        "zero_stage": imported.get("zero_stage", zero.get("stage")),
        "optimizer_on": (zero.get("offload_optimizer") or {}).get("device"),
        "parameters_on": (zero.get("offload_param") or {}).get("device"),
        "processes": about.get("processes"),
        "run": about.get("run"),
    }
    return {key: value for key, value in found.items() if value not in (None, "none")}


def recognise(folder: Path) -> Kind | None:
    """Recognise the kind of a folder by its files' names; None if it is of no known kind."""
    if (folder / MANIFEST_NAME).is_file():
        return "checkpoint"
    if several_checkpoints(folder):
        return "several"
    if (folder / "latest_universal").is_file() or (folder / "zero" / "optimizer_state.pt").is_file():
        return "deepspeed_universal"
    if find_deepspeed(folder) is not None:
        return "deepspeed"
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if any(folder.glob("*.safetensors")):
        return "model"
    return "pickled_model" if any(folder.glob("pytorch_model*.bin")) else None


def several_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints directly below a folder, by number and name.

    A checkpoint has an automatic name or a manifest. Damaged checkpoints are included.
    """
    numbered = [path for _, path in numbered_checkpoints(folder)]
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and not path.name.startswith(".") and (path in numbered or (path / MANIFEST_NAME).is_file())
    ]
    return sorted(found, key=lambda path: ((split_number(path.name) or ("", -1))[1], path.name))


def find_deepspeed(folder: Path) -> Path | None:
    """Return the folder with a DeepSpeed checkpoint's files: `folder`, its `latest` tag's, or Accelerate's inside."""
    if any(folder.glob(_MODEL_STATES)):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        tagged = folder / latest.read_text(encoding="utf-8", errors="replace").strip()
        if any(tagged.glob(_MODEL_STATES)):
            return tagged
    inner = folder / "pytorch_model"  # Accelerate's save_state
    return inner if any(inner.glob(_MODEL_STATES)) else None
