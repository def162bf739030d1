"""The one document: launch settings and the training configuration, parsed, frozen, every value located."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zero_plugin.config.tree import Entry, Origin, OriginKind, Path, Tree
from zero_plugin.config.write import accelerate_values, yaml_text
from zero_plugin.errors import ConfigError, Problem

__all__ = ["Document"]

_TRAINING = "deepspeed"


@dataclass(frozen=True, slots=True)
class Document:
    """What a run was asked to be, before anything is resolved; open fields hold `AUTO`.

    Attributes:
        launch: Accelerate's launch keys by their own names, e.g. `("mixed_precision",)`, `("num_processes",)`.
        deepspeed: the training configuration under DeepSpeed's own key names. It also drives the paths without
            DeepSpeed (accumulation, clipping, optimizer and scheduler sections), so it is there on every path.
        sources: the files that were read, in order, for messages.
        sections: where each key that holds keys is written, by path; training sections start with `deepspeed`.
        notes: warnings and notes on what was understood or has no effect; a run prints each one's headline once.
        problems: what reading found wrong but could read past; `check_document` raises them with its own.
    """

    launch: Tree = field(default_factory=Tree)
    deepspeed: Tree = field(default_factory=Tree)
    sources: tuple[str, ...] = ()
    sections: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()

    def overlay(self, values: Mapping[Path, Any], *, kind: OriginKind, where: Mapping[Path, str]) -> Document:
        """A document with `values` laid over this one (the later layer wins).

        Args:
            values: by path; a path that starts with `deepspeed` goes to the training configuration, any other is a
                launch key.
            kind: what the new layer is.
            where: for each path, the flag or call that set it.
        """
        launch: dict[Path, Entry] = {}
        deepspeed: dict[Path, Entry] = {}
        for path, value in values.items():
            origin = Origin(kind, where[path])
            tree = Tree.from_nested({"v": value}, lambda _, origin=origin: origin)  # type: ignore[misc]
            for leaf, entry in tree.entries.items():
                if path[0] == _TRAINING:
                    deepspeed[path[1:] + leaf[1:]] = entry
                else:
                    launch[path + leaf[1:]] = entry
        return replace(self, launch=self.launch.replace(launch), deepspeed=self.deepspeed.replace(deepspeed))

    def to_deepspeed(self) -> dict[str, Any]:
        """The training configuration as a DeepSpeed JSON holds it; an open field is `auto`.

        Raises:
            ConfigError: reading found problems, so that not all that is written is here.
        """
        self._refuse_problems()
        return self.deepspeed.nested(auto="auto")

    def to_accelerate_yaml(self) -> str:
        """The text of a launch YAML with Accelerate's keys that holds all of this document but comments and places.

        Raises:
            ConfigError: reading found problems, so that not all that is written is here.
        """
        self._refuse_problems()
        return yaml_text(accelerate_values(self.launch, self.deepspeed))

    def _refuse_problems(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)
