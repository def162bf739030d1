"""What a folder holds: a checkpoint of this package, several, one of another layer, or a model; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from zero_plugin.checkpoint.manifest import MANIFEST_NAME

__all__ = ["KINDS", "Kind", "find_deepspeed", "recognise", "several_checkpoints"]

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


def recognise(folder: Path) -> Kind | None:
    """What lies in a folder, by its files' names; None for anything else."""
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
    """The checkpoints just below a folder, the damaged ones too: named by number, or with a manifest; oldest first."""
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and not path.name.startswith(".") and _is_checkpoint(path)
    ]
    return sorted(found, key=_by_number)


def find_deepspeed(folder: Path) -> Path | None:
    """The folder with a DeepSpeed checkpoint's files: this one, that of its `latest` tag, or Accelerate's in it."""
    if any(folder.glob(_MODEL_STATES)):
        return folder
    latest = folder / "latest"
    if latest.is_file():
        tagged = folder / latest.read_text(encoding="utf-8", errors="replace").strip()
        if any(tagged.glob(_MODEL_STATES)):
            return tagged
    inner = folder / "pytorch_model"  # Accelerate's save_state
    return inner if any(inner.glob(_MODEL_STATES)) else None


def _is_checkpoint(path: Path) -> bool:
    if (path / MANIFEST_NAME).is_file():
        return True
    return path.name.removeprefix("checkpoint_").isdigit() and path.name.startswith("checkpoint_")


def _by_number(path: Path) -> tuple[int, str]:
    digits = path.name[len(path.name.rstrip("0123456789")) :]
    return int(digits or -1), path.name
