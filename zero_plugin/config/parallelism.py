"""Settings of parallelism other than data parallelism, in the terms of Accelerate's `ParallelismConfig`.

Only sequence parallelism is supported. Here it is one key, `sequence_parallel_size`. Data parallelism uses the
remaining processes, so its sizes follow from the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.keys import SEQUENCE
from zero_plugin.config.tree import AUTO, Entry, Tree, show
from zero_plugin.errors import ConfigError, Problem

SEQUENCE_KEY: Final = SEQUENCE.name
SECTION: Final = "parallelism_config"
_PREFIX: Final = "parallelism_config_"
_VARIABLES: Final = "PARALLELISM_CONFIG_"  # prefix of the variables in which Accelerate's launcher passes them
_KERNELS: Final = ("flash_attention_2", "flash_attention_3", "sdpa")
# Keys of sequence parallelism without effect here, with the reason.
_UNREAD: Final[Mapping[str, str]] = {
    "sp_seq_length": "the length of sequences follows from each batch",
    "sp_seq_length_is_variable": "the length of sequences may always change from batch to batch",
    "sp_attn_implementation": "attention is torch's scaled_dot_product_attention, which chooses its kernel",
}
DATA_PARALLEL_ONLY: Final = (
    "Write 1, or delete it: processes share samples (sequence_parallel_size), or each has samples of its own."
)


def sequence_parallel_size(document: Document) -> int:
    """Return the number of processes that share each sample of a checked document; 1 if not set."""
    size = document.deepspeed.value(SEQUENCE_KEY)
    return size if isinstance(size, int) else 1


def read_parallelism(launch: Tree, deepspeed: Tree) -> tuple[Tree, Tree, list[Problem]]:
    """Translate Accelerate's keys of sequence parallelism into the one key. Return both trees, and problems and notes.

    Args:
        launch: the launch keys; the translated keys are removed from them.
        deepspeed: the training configuration; gets `sequence_parallel_size`.
    """
    found: list[Problem] = []

    def said(name: str, nothing: tuple[Any, ...]) -> Entry | None:
        """Return the entry of a key that requests something; its origin has the key as it is typed."""
        entry = launch.get(SECTION, f"{_PREFIX}{name}")
        if entry is None or entry.value in (None, AUTO, *nothing):
            return None
        return Entry(entry.value, replace(entry.origin, key=f"{SECTION}.{_PREFIX}{name}"))

    if size := said("sp_size", (1, "1")):
        known = deepspeed.get(SEQUENCE_KEY)
        if known is not None and known.value not in (None, AUTO, size.value):
            message = f"{show(size.value)} here, but {SEQUENCE_KEY} is {show(known.value)} at {known.origin.where}"
            found.append(Problem(size.origin.where, size.origin.key, message, "Keep one of the two."))
        else:
            deepspeed = deepspeed.replace({(SEQUENCE_KEY,): size})
    if backend := said("sp_backend", ("", "deepspeed")):
        message = f"{show(backend.value)} is not legal here"
        found.append(Problem(backend.origin.where, backend.origin.key, message, "Write deepspeed."))
    for name, why in _UNREAD.items():
        if unread := said(name, ("", "None", True)):
            value, origin = show(unread.value), unread.origin
            found.append(Problem(origin.where, origin.key, f"has no effect: {why}", "Delete it.", value, "note"))
    sequences = f"{_PREFIX}sp_"
    return launch.where(lambda p, _: p[0] != SECTION or not p[-1].startswith(sequences)), deepspeed, found


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Accelerate's record of sequence parallelism, with its names and defaults. The record has no effect.

    Attributes:
        sp_seq_length: the length of all sequences, if it does not change.
        sp_seq_length_is_variable: whether it may change from batch to batch.
        sp_attn_implementation: `sdpa`, `flash_attention_2`, `flash_attention_3`, or a kernel's repository.

    Raises:
        ValueError: the length is constant and not given, or the implementation is unknown.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = _variable("SP_SEQ_LENGTH_IS_VARIABLE", "true").lower() == "true"
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            given = _variable("SP_SEQ_LENGTH", "None")
            if given == "None":
                raise ValueError(
                    f"sp_seq_length_is_variable is False, so sp_seq_length is needed, or {_VARIABLES}SP_SEQ_LENGTH."
                )
            self.sp_seq_length = int(given)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = _variable("SP_ATTN_IMPLEMENTATION", "") or None
        kernel = self.sp_attn_implementation
        if kernel is not None and kernel not in _KERNELS and not ("/" in kernel and "flash-attn" in kernel):
            raise ValueError(f"Invalid sp_attn_implementation: {kernel}. Write one of {', '.join(_KERNELS)}.")


def _is_above_one(size: str) -> property:
    return property(lambda config: getattr(config, size) > 1, doc=f"Whether `{size}` is above 1.")


@dataclass
class ParallelismConfig:
    """Accelerate's record of how processes share work, with its names and defaults.

    Attributes that are None are read from Accelerate's variables, e.g. `PARALLELISM_CONFIG_SP_SIZE`.

    Attributes:
        dp_replicate_size, dp_shard_size: accepted without effect: they follow from the number of processes.
        tp_size, cp_size: only 1 is supported.
        cp_backend: `torch`.
        sp_size: number of processes that share each sample: `sequence_parallel_size`.
        sp_backend: `deepspeed`.
        tp_handler, cp_handler: not used.
        sp_handler: a `DeepSpeedSequenceParallelConfig`, which has no effect.

    Raises:
        ValueError: a size is below 1, a backend is unknown, or sizes exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is None:
                setattr(self, name, int(_variable(name.upper(), "1")))
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")
        for name, legal in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            if getattr(self, name) is None:
                setattr(self, name, _variable(name.upper(), legal))
            if getattr(self, name) != legal:
                raise ValueError(f"{name} must be one of ['{legal}'], but got {getattr(self, name)}")
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive: "
                f"cp_size is {self.cp_size} and sp_size is {self.sp_size}."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ValueError(
                "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism "
                "(dp_replicate_size > 1 and dp_shard_size == 1)."
            )
        if self.sp_enabled and self.sp_handler is None:
            self.sp_handler = DeepSpeedSequenceParallelConfig()

    def _size(self, name: str) -> int:
        return int(getattr(self, f"{name}_size"))

    dp_replicate_enabled = _is_above_one("dp_replicate_size")
    dp_shard_enabled = _is_above_one("dp_shard_size")
    tp_enabled = _is_above_one("tp_size")
    cp_enabled = _is_above_one("cp_size")
    sp_enabled = _is_above_one("sp_size")

    @property
    def data_parallel_size(self) -> int:
        """The product of the sizes of data parallelism."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """The product of the other sizes."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    @property
    def total_size(self) -> int:
        """The product of all sizes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions of data parallelism that are above 1."""
        return [name for name in ("dp_replicate", "dp_shard") if self._size(name) > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The other dimensions that are above 1."""
        return [name for name in ("tp", "cp", "sp") if self._size(name) > 1]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions that are above 1."""
        return self.dp_dim_names + self.non_dp_dim_names


def sequence_size_in_code(given: Any) -> int | None:
    """Return the size of sequence parallelism in `Accelerator(parallelism_config=…)`; None if not given.

    The record may be this package's or Accelerate's.

    Raises:
        ConfigError: the record requests tensor or context parallelism, or is not a `ParallelismConfig`.
    """
    if given is None:
        return None
    where = "Accelerator(parallelism_config=…)"
    size = getattr(given, "sp_size", None)
    if not isinstance(size, int):
        message = f"a {type(given).__name__} is no ParallelismConfig"
        fix = "Pass zero_plugin.utils.ParallelismConfig(sp_size=…)."
        raise ConfigError([Problem(where, "", message, fix)])
    others = {name: getattr(given, name, 1) for name in ("tp_size", "cp_size")}
    problems = [
        Problem(where, name, f"{other} is not supported", DATA_PARALLEL_ONLY)
        for name, other in others.items()
        if other != 1
    ]
    if problems:
        raise ConfigError(problems)
    return size


def _variable(name: str, default: str) -> str:
    return os.environ.get(f"{_VARIABLES}{name}", default)
