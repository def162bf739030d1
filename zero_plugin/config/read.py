"""A launch YAML or a DeepSpeed JSON, from a file or from code, as one document."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.json_reader import looks_like_json, parse_json
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING, LaunchSettings, launch_schema
from zero_plugin.config.located import MAX_DEPTH, Located, leaves, sections
from zero_plugin.config.overlay import same_value
from zero_plugin.config.translate import LAUNCH_FIELDS, SHORT_FIELDS, one_spelling, translate_short_fields
from zero_plugin.config.tree import AUTO, Entry, Origin, OriginKind, Path, Tree, dotted
from zero_plugin.config.validation import deepspeed_schema, read_as_wanted, show, validator
from zero_plugin.config.yaml_reader import parse_yaml
from zero_plugin.errors import ConfigError, Problem

__all__ = ["document_from_mapping", "read_document"]

_MAX_BYTES: Final = 1 << 20  # a real configuration has a few kilobytes; this is a data file given by mistake
_TRAINING: Final = "deepspeed_config"
_TRAINING_FILE: Final = "deepspeed_config_file"
_DEFAULT_STAGE: Final = Entry(
    2, Origin("default", "zero_plugin", "Accelerate's stage for a launch config that asks for DeepSpeed without one")
)


def read_document(path: str | FilePath, *, deepspeed_config_file: str | FilePath | None = None) -> Document:
    """Read a launch YAML with Accelerate's keys, or a DeepSpeed JSON by itself; content tells which, not the extension.

    Args:
        path: the file.
        deepspeed_config_file: a DeepSpeed JSON that takes the place of the one that the file names, as the launch flag
            of that name does.

    Returns:
        The document; what was wrong but could be read past is in its `problems`, which `check_document` raises.

    Raises:
        ConfigError: a file cannot be read at all: missing, not text, broken YAML or JSON, not a mapping.
    """
    reading = _Reading("file")
    return reading.document(reading.parse(FilePath(path)), FilePath(path), deepspeed_config_file)


def document_from_mapping(mapping: Mapping[str, Any], where: str) -> Document:
    """A document from a dict in code, in either form that a file may have.

    Args:
        mapping: launch keys, or a DeepSpeed configuration.
        where: the call that got it, e.g. `Accelerator(config=…)`.

    Raises:
        ConfigError: a value is no plain value, or the file that it names cannot be read.
    """
    return _Reading("code").document(_locate(mapping, where, ()), FilePath(), None)


@dataclass
class _Reading:
    """What comes up while the files of one document are read."""

    kind: OriginKind
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def parse(self, path: FilePath) -> Located:
        """The file's content as located values, whichever of the two languages it is in."""
        text = _text(path)
        self.sources.append(str(path))
        if not looks_like_json(text):
            root = parse_yaml(text, str(path), self.problems)
        elif path.suffix in (".yaml", ".yml"):
            root = self._parse_flow_yaml(text, str(path))
        else:
            root = parse_json(text, str(path), self.problems)
        if not isinstance(root.value, dict):
            found = "is empty" if root.value is None else f"holds {show(root.plain())}, not keys with values"
            raise _unreadable(root.where, found, "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON.")
        return root

    def document(self, root: Located, path: FilePath, training_file: str | FilePath | None) -> Document:
        """Both halves of the document, each key under one path, from `root` and the file that it names."""
        is_launch = _is_launch(root.value, path)
        launch = dict(root.value) if is_launch else {}
        training = self._training_part(launch.pop(_TRAINING, None), root) if is_launch else root
        places = dict(sections(Located(launch, root.where)))
        inline = dict(training.value)
        for name in LAUNCH_FIELDS:
            if is_launch and name in inline:
                launch[name] = inline.pop(name)
        named = inline.pop(_TRAINING_FILE, launch.pop(_TRAINING_FILE, None))
        if training_file is not None:
            named = Located(str(training_file), "--deepspeed_config_file")
        short = {name: inline.pop(name) for name in SHORT_FIELDS if is_launch and name in inline}

        layers = []
        for node in (self._named_file(named, path.parent), Located(inline, training.where)):
            layers.append(self._understood(Tree(leaves(node, self.kind)), deepspeed_schema()))
            places.update({("deepspeed", *section): where for section, where in sections(node)})
        fields = translate_short_fields(leaves(Located(short, training.where), self.kind))
        layers.append(self._understood(Tree(fields), deepspeed_schema()))
        deepspeed = self._merged(layers)

        launch_tree = Tree(leaves(Located(launch, root.where), self.kind))
        self._note_keys_without_meaning(launch_tree)
        settings = launch_tree.where(lambda path, _: path[0] in LaunchSettings.model_fields)
        launch_tree = launch_tree.replace(self._understood(settings, launch_schema()).entries)
        asks = str(launch_tree.value("distributed_type")).upper() == "DEEPSPEED"
        if asks and named is None and not deepspeed.has_section("zero_optimization", "stage"):
            deepspeed = deepspeed.replace({("zero_optimization", "stage"): _DEFAULT_STAGE})
        return Document(
            launch_tree, deepspeed, tuple(self.sources), places, tuple(dict.fromkeys(self.notes)), tuple(self.problems)
        )

    def _parse_flow_yaml(self, text: str, name: str) -> Located:
        """YAML whose first character is a brace: JSON, as a rule, with its tabs and comments."""
        found: list[Problem] = []
        try:
            root = parse_json(text, name, found)
        except ConfigError:
            return parse_yaml(text, name, self.problems)
        self.problems += found
        return root

    def _training_part(self, node: Located | None, root: Located) -> Located:
        if node is None or node.value is None:
            return Located({}, root.where)
        if isinstance(node.value, dict):
            return node
        fix = f"Write a path as {_TRAINING}: {{{_TRAINING_FILE}: …}}, or DeepSpeed's keys below it."
        self.problems.append(Problem(node.where, _TRAINING, f"{show(node.plain())} is not a mapping of keys", fix))
        return Located({}, root.where)

    def _named_file(self, named: Located | None, folder: FilePath) -> Located:
        """The DeepSpeed JSON that a launch config names, looked for beside it and then in the working directory."""
        nothing = Located({}, "")
        if named is None or named.value in (None, "", "none", "None"):
            return nothing
        if isinstance(named.value, dict) and self.kind == "code":
            return named
        if not isinstance(named.value, str):
            message = f"{show(named.plain())} is not a path"
            self.problems.append(Problem(named.where, _TRAINING_FILE, message, "Write the path of a DeepSpeed JSON."))
            return nothing
        wanted = FilePath(named.value).expanduser()
        is_flag = named.where.startswith("--")
        candidates = [wanted] if is_flag else list(dict.fromkeys([folder / wanted, wanted]))
        existing = [path for path in candidates if path.is_file()]
        if not existing:
            looked = " or ".join(str(path) for path in candidates)
            self.problems.append(
                Problem(named.where, _TRAINING_FILE, f"no file {looked}", _nearest_file(candidates[0]))
            )
            return nothing
        if len({path.resolve() for path in existing}) > 1:
            self.notes.append(f"{named.where}: {_TRAINING_FILE}: read {existing[0]}, not {existing[1]}")
        try:
            root = self.parse(existing[0])
        except ConfigError as error:
            self.problems += error.problems
            return nothing
        if _is_launch(root.value, existing[0]):
            message = f"{existing[0]} is a launch config, not a DeepSpeed configuration"
            self.problems.append(Problem(named.where, _TRAINING_FILE, message, "Name a DeepSpeed JSON here."))
            return nothing
        return root

    def _understood(self, tree: Tree, schema: Mapping[str, Any]) -> Tree:
        if not tree:
            return tree
        tree, moved = one_spelling(tree)
        tree, read = read_as_wanted(tree, validator(schema))
        self.notes += [*moved, *read]
        return tree

    def _merged(self, layers: list[Tree]) -> Tree:
        """File, inline keys and short fields as one tree: equal values agree, an open one yields, others clash."""
        merged = Tree()
        for layer in layers:
            taken: dict[Path, Entry] = {}
            for path, entry in layer.entries.items():
                before = merged.get(*path)
                if before is None or before.value is AUTO:
                    taken[path] = entry
                elif entry.value is not AUTO and not same_value(before.value, entry.value):
                    message = f"{show(entry.value)} here, but {show(before.value)} at {before.origin.where}"
                    fix = "Keep one of the two, or write auto in the DeepSpeed JSON."
                    self.problems.append(Problem(entry.origin.where, dotted(path), message, fix))
            merged = merged.replace(taken)
        return merged

    def _note_keys_without_meaning(self, launch: Tree) -> None:
        for name, scope in WITHOUT_MEANING.items():
            entries = launch.where(lambda path, _, name=name: path[0] == name).entries.values()  # type: ignore[misc]
            spoken = next((e for e in entries if e.value not in (None, False, "", "no", (), {})), None)
            if spoken is not None:
                self.notes.append(f"{spoken.origin.where}: {name}: has no meaning here ({scope})")


def _is_launch(keys: Mapping[str, Any], path: FilePath) -> bool:
    """Whether these are Accelerate's launch keys rather than DeepSpeed's; by majority, in doubt by the extension."""
    if _TRAINING in keys:
        return True
    known = {*LaunchSettings.model_fields, *WITHOUT_MEANING, *REFUSED_KEYS, _TRAINING_FILE}
    training = deepspeed_schema()["properties"]
    of_launch = sum(key in known for key in keys)
    of_training = sum(key in training for key in keys)
    if of_launch == of_training:
        short = any(key in SHORT_FIELDS and key not in training for key in keys)
        return short or path.suffix in (".yaml", ".yml")
    return of_launch > of_training


def _text(path: FilePath) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(str(path), "no such file", _nearest_file(path)) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _unreadable(str(path), f"cannot be read: {reason}", "Give a readable YAML or JSON file.") from None
    if len(data) > _MAX_BYTES:
        raise _unreadable(str(path), f"is larger than {_MAX_BYTES} bytes", "This is no configuration; check the path.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text: byte {data[error.start]:#04x} at position {error.start}"
        raise _unreadable(str(path), message, "Save it as UTF-8.") from None


def _nearest_file(path: FilePath) -> str:
    folder = path.parent
    try:
        names = [child.name for child in folder.iterdir() if child.is_file()]
    except OSError:
        return f"The folder {folder} does not exist or cannot be read; check the path."
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {folder / near[0]}?" if near else f"Check the path: {folder} holds no such name."


def _unreadable(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])


def _locate(value: Any, where: str, path: Path) -> Located:
    """A value from code as plain, located values: mappings, lists, and scalars, also NumPy's and paths."""
    if len(path) > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels"
        raise ConfigError([Problem(where, dotted(path[:3]) + "…", message, "No setting is so deep; flatten it.")])
    if isinstance(value, Mapping):
        return Located({str(k): _locate(child, where, (*path, str(k))) for k, child in value.items()}, where)
    if isinstance(value, list | tuple | set | frozenset):
        return Located([_locate(child, where, (*path, str(n))) for n, child in enumerate(value)], where)
    if value is None or value is AUTO or isinstance(value, bool | int | float | str):
        return Located(value, where)
    if isinstance(value, PurePath):
        return Located(str(value), where)
    if isinstance(value, numbers.Integral):
        return Located(int(value), where)
    if isinstance(value, numbers.Real):
        return Located(float(value), where)
    fix = "Pass plain values: numbers, text, true or false, None, lists, dicts."
    raise ConfigError([Problem(where, dotted(path), f"a {type(value).__name__} is no plain value", fix)])
