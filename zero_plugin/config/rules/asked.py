"""A document as the rules ask it: values by dotted key, and findings at the place where a key is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from zero_plugin.config.document import SHORT_FIELDS, Document
from zero_plugin.config.schema import key_schema
from zero_plugin.config.tree import AUTO, Entry, Tree
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem, Severity

STAGE: Final = "zero_optimization.stage"
_FIELDS: Final = {".".join(path): name for name, path in SHORT_FIELDS.items()}  # short field and flag alike


@dataclass(frozen=True, slots=True)
class Asked:
    """What a document asks for. An open field (`auto`) equals no value, so that it contradicts nothing."""

    document: Document

    def entry(self, key: str) -> Entry | None:
        """The leaf at the dotted `key` of the training configuration, or else of the launch keys."""
        path = key.split(".")
        return self.document.deepspeed.get(*path) or self.launch.get(*path)

    def value(self, key: str, default: Any = None) -> Any:
        """The value at the dotted `key`; AUTO for an open one."""
        entry = self.entry(key)
        return default if entry is None else entry.value

    def is_on(self, key: str) -> bool:
        """Whether the key is there and true."""
        return self.value(key) is True

    def has(self, section: str) -> bool:
        """Whether anything is written at or below the dotted key."""
        return self.document.deepspeed.has_section(*section.split("."))

    def below(self, section: str) -> list[str]:
        """The dotted keys of all that is written below the dotted key."""
        return [f"{section}.{'.'.join(path)}" for path in self.document.deepspeed.section(*section.split("."))]

    def says_something(self, key: str) -> bool:
        """Whether a person wrote a value that is neither open, nor empty, nor the default."""
        entry = self.entry(key)
        if entry is None or not entry.origin.typed_by_user or entry.value is AUTO:
            return False
        wanted = key_schema(tuple(key.split("."))) or {}
        return entry.value not in (None, "", "none", (), {}) and entry.value != wanted.get("default", AUTO)

    def written(self, key: str) -> str:
        """Where a key that is there, or the first key of a section that is, is written."""
        entry = self.entry(key)
        return self.document.place(("deepspeed", *key.split("."))) if entry is None else entry.origin.where

    # ---- what nearly every rule asks ------------------------------------------------------------------------------

    @property
    def launch(self) -> Tree:
        """The launch keys."""
        return self.document.launch

    @property
    def on_cpu(self) -> str:
        """Where `use_cpu` is written to be true; "" where it is not."""
        return self.written("use_cpu") if self.is_on("use_cpu") else ""

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, 0 where none is written; None where it is open or no stage."""
        stage = self.value(STAGE, default=0)
        return stage if isinstance(stage, int) and not isinstance(stage, bool) else None

    @property
    def stage_said(self) -> str:
        """The stage and where it is written, for a message."""
        entry = self.entry(STAGE)
        typed = entry is not None and entry.origin.typed_by_user
        return f"the stage is {self.stage} " + (f"at {self.written(STAGE)}" if typed else "where none is written")

    @property
    def precision(self) -> str | None:
        """`fp16`, `bf16` or `no` where the document settles it; None where the run still may."""
        asked = self.value("mixed_precision")
        on = [kind for kind in ("fp16", "bf16") if self.is_on(f"{kind}.enabled")]
        if on:
            return on[0]
        if asked in ("no", "fp16", "bf16"):
            return str(asked)
        off = all(self.value(f"{kind}.enabled") is False for kind in ("fp16", "bf16"))
        return "no" if off else None

    def offload(self, what: str) -> Any:
        """Where `optimizer` or `param` is offloaded to: `none`, `cpu`, `nvme`; AUTO where that is open."""
        return self.value(f"zero_optimization.offload_{what}.device", default="none")

    @property
    def optimizer(self) -> str:
        """The optimizer section's type in lower case; "" where there is none."""
        kind = self.value("optimizer.type")
        return kind.lower() if isinstance(kind, str) else ""

    # ---- findings -------------------------------------------------------------------------------------------------

    def error(self, key: str, message: str, fix: str) -> Problem:
        """What would not start, or not train as written."""
        return self._finding(key, message, fix, "error")

    def warning(self, key: str, message: str, fix: str) -> Problem:
        """What has no effect."""
        return self._finding(key, message, fix, "warning")

    def no_effect(self, key: str, why: str, fix: str = "Delete it.") -> Problem:
        """A warning that says why the key has no effect."""
        return self._finding(key, f"has no effect: {why}", fix, "warning")

    def idle(self, keys: Iterable[str], why: str, fix: str = "Delete it.") -> Iterator[Problem]:
        """A warning, as `no_effect`, for each of the keys, or sections, that says something."""
        for key in keys:
            if any(map(self.says_something, (key, *self.below(key)))):
                yield self.no_effect(key, why, fix)

    def note(self, key: str, message: str) -> Problem:
        """What a person may like to know."""
        return self._finding(key, message, "", "note")

    def how_to_set(self, key: str, value: str, *causes: str) -> str:
        """What to write for `key`, where it is written, or under its name in this document.

        Where it, or the value at one of the keys `causes`, came from a flag: which flag to give.
        """
        entry = self.entry(key)
        entries = [entry, *(self.entry(cause) for cause in causes)]
        if key in _FIELDS and any(one is not None and one.origin.kind == "flag" for one in entries):
            return f"Give --{_FIELDS[key]} {value}"
        if entry is not None and entry.origin.typed_by_user:
            return f"Write {value} at {entry.origin.where}"
        in_launch_config = bool(len(self.launch)) and key in _FIELDS
        return f"Write {_FIELDS[key] if in_launch_config else key}: {value}"

    def _finding(self, key: str, message: str, fix: str, severity: Severity) -> Problem:
        value = self.value(key)
        return Problem(self.written(key), key, message, fix, "" if value is None else show(value), severity)


def is_count(value: Any) -> bool:
    """Whether `value` is an integer above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value: Any) -> bool:
    """Whether `value` is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
