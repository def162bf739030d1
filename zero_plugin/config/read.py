"""Reader of configuration files and of mappings from code. The content decides: a launch YAML or a DeepSpeed JSON."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal

from zero_plugin.config.document import Document, one_spelling, translate_short_fields
from zero_plugin.config.keys import CONFIG_FILE, LAUNCH_FIELDS, SHORT_FIELDS, STAGE
from zero_plugin.config.launch_settings import LAUNCH_KEYS, ignored_keys, launch_schema
from zero_plugin.config.located import MAX_DEPTH, Located, leaves, parse_text, sections, syntax_error, text_place
from zero_plugin.config.parallelism import read_parallelism
from zero_plugin.config.schema import deepspeed_schema
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, dotted, read_as_wanted, same_value, show
from zero_plugin.errors import ConfigError, Problem

STANDARD_INPUT: Final = "<standard input>"  # name in messages

_READY: Final = Path(__file__).parents[1] / "ds_configs"
_MAX_BYTES: Final = 1 << 20  # a real configuration has a few kilobytes; a larger file is data, given by mistake
_NEAR: Final = 0.75  # similarity of two names, from 0 to 1; two swapped letters of four are 0.75


def parse_file(path: Path, problems: list[Problem], content: bytes | None = None) -> Located:
    """Read a YAML or JSON file with keys at its top level. The content decides the language, not the extension.

    Args:
        path: the file.
        problems: gets duplicate keys.
        content: the file's content, if known; `path` is then only its name.

    Raises:
        ConfigError: the file is missing, not text, broken, or holds no keys.
    """
    text = _text(path, _bytes(path) if content is None else content)
    found: list[Problem] = []
    try:
        root = parse_text(text, str(path), found)
    except ConfigError as error:
        errors = [problem for problem in found if problem.severity == "error"]
        raise ConfigError([*errors, *error.problems]) from None
    problems += found
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        holds = "the file is empty" if root.value is None else f"holds {kind}, not keys"
        raise syntax_error(root.where, holds, "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON.")
    return root


def nearest_file(path: Path) -> str:
    """Return the fix for a `path` that is not a file."""
    try:
        if os.path.isdir(path):  # noqa: PTH112 - False too for a name that is too long for any
            return f"{path} is a folder; name a file in it."
        names = [child.name for child in path.parent.iterdir() if child.is_file()]
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return f"The folder {path.parent} does not exist or cannot be read; check the path."
    # Compare without extensions, which would make any two YAML files similar. For equal stems, prefer the same
    # extension.
    by_stem = {Path(name).stem: name for name in sorted(names, key=lambda name: Path(name).suffix == path.suffix)}
    near = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=_NEAR)
    if near:
        return f"Did you mean {path.parent / by_stem[near[0]]}?"
    folder = "the working directory" if path.parent == Path() else path.parent
    return f"Check the path: {folder} holds no such name."


def named_file(named: str) -> Path:
    """Return the named configuration: a file, or one of this package's by name, such as `zero2`.

    Raises:
        ConfigError: no such file exists, and the name looks like one of this package's.
    """
    file = Path(named)
    if file.parent != Path() or file.suffix or not file.name or os.path.lexists(file):
        return file
    ready = {file.stem: file for file in sorted(_READY.glob("*.yaml"))}
    if named not in ready:
        near = difflib.get_close_matches(named, ready, n=1, cutoff=_NEAR)
        fix = f"{f'Did you mean {near[0]}? ' if near else ''}Write a path, or a ready config: {', '.join(ready)}."
        raise syntax_error(named, "no such file", fix)
    return ready[named]


def _bytes(path: Path) -> bytes:
    try:
        # The shell's own pipes, as in `check <(…)`, have no name in the file system, and always have a writer.
        if path.is_fifo() and os.path.lexists(os.path.realpath(path)):
            raise OSError(None, "it is a pipe, which may never have an end")
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise syntax_error(str(path), "no such file", nearest_file(path)) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise syntax_error(str(path), f"cannot be read: {reason}", "Give a readable YAML or JSON file.") from None


def _text(path: Path, data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        raise syntax_error(str(path), f"is larger than {_MAX_BYTES} bytes", "This is no configuration; check the path.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        message = f"is not UTF-8 text: byte {data[error.start]:#04x}"
        where = text_place(str(path), before, len(before))
        raise syntax_error(where, message, "Give a text file, saved as UTF-8.") from None


_TRAINING: Final = "deepspeed_config"
DEFAULT_STAGE: Final = Entry(
    2, Origin("default", "zero_plugin", "Accelerate's default where DeepSpeed is requested without a stage")
)
_STAGE_OF_A_FILE: Final = Entry(
    0, Origin("default", "DeepSpeed's default", "the configuration that the launch config names has no stage")
)


def read_document(path: str | os.PathLike[str], content: bytes | None = None) -> Document:
    """Read a launch YAML with Accelerate's keys, or a DeepSpeed JSON. The content decides, not the extension.

    Args:
        path: the file.
        content: the file's content, if known, e.g. from standard input; `path` is then only its name.

    Returns:
        The document. `check_document` raises its `problems`, after which reading could continue.

    Raises:
        ConfigError: a file cannot be read at all: missing, not text, broken YAML or JSON, not a mapping.
    """
    try:
        file = Path(path)
    except TypeError:
        fix = "Pass the path of a launch YAML or a DeepSpeed JSON, or a dict with either content."
        raise ConfigError([Problem("config", "", f"{show(path)} is neither a path nor a dict", fix)]) from None
    reading = _Reading("file")
    return reading.document(reading.parse(file, content), file)


def document_from_mapping(mapping: Mapping[str, Any], where: str) -> Document:
    """Return the document of a dict in code, which may have the keys of either kind of file.

    Args:
        mapping: launch keys, or a DeepSpeed configuration.
        where: the call that got the dict, e.g. `Accelerator(config=…)`.

    Raises:
        ConfigError: a value is not plain, or a DeepSpeed JSON that it names cannot be read.
    """
    return _Reading("code").document(_locate(mapping, where, ()), Path())


def document_from_code(config: str | os.PathLike[str] | Mapping[str, Any] | None, where: str) -> Document:
    """Return the document of a file, a dict, or None (an empty one); see the functions above."""
    if config is None:
        return Document()
    if isinstance(config, Mapping):
        return document_from_mapping(config, where)
    return read_document(named_file(config) if isinstance(config, str) else config)


@dataclass
class _Reading:
    """Findings and sources that accumulate while the files of one document are read."""

    kind: Literal["file", "code"]
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def parse(self, path: Path, content: bytes | None = None) -> Located:
        """Return the file's content, and add the file to the document's sources."""
        self.sources.append(str(path))
        found: list[Problem] = []
        root = parse_file(path, found, content)
        self._sort(found)
        return root

    def _sort(self, found: list[Problem]) -> None:
        self.problems += [problem for problem in found if problem.severity == "error"]
        self.notes += [problem for problem in found if problem.severity != "error"]

    def document(self, root: Located, path: Path) -> Document:
        """Return the document from `root` and the file that it names, with each key under one path."""
        is_launch = _is_launch(root.value, path)
        launch = dict(root.value) if is_launch else {}
        training = self._training_part(launch.pop(_TRAINING, None), root) if is_launch else root
        inline = dict(training.value)
        if is_launch:
            launch.update({name: inline.pop(name) for name in LAUNCH_FIELDS if name in inline})
        short = {name: inline.pop(name) for name in SHORT_FIELDS if is_launch and name in inline}
        named = self._one_of(inline.pop(CONFIG_FILE.name, None), launch.pop(CONFIG_FILE.name, None))

        nodes = [self._named_file(named, path.parent), Located(inline, training.where)]
        layers = [leaves(node, self.kind) for node in nodes]
        layers.append(translate_short_fields(leaves(Located(short, training.where), self.kind)))
        deepspeed = self._merged([self._training_layer(Tree(layer)) for layer in layers])
        launch_tree = self._launch_tree(Tree(leaves(Located(launch, root.where), self.kind)))
        launch_tree, deepspeed, of_parallelism = read_parallelism(launch_tree, deepspeed)
        self._sort(of_parallelism)
        asked = launch_tree.value("distributed_type") == "DEEPSPEED"
        if asked and not deepspeed.has_section(*STAGE.path):
            stage = DEFAULT_STAGE if named is None else _STAGE_OF_A_FILE
            deepspeed = deepspeed.replace({STAGE.path: stage})

        places = dict(sections(Located(launch, root.where)))
        for node in nodes:
            places.update({("deepspeed", *section): where for section, where in sections(node)})
        notes = tuple(dict.fromkeys(self.notes))
        return Document(launch_tree, deepspeed, tuple(self.sources), places, notes, tuple(self.problems))

    def _training_part(self, node: Located | None, root: Located) -> Located:
        if node is None or node.value is None:
            return Located({}, root.where)
        if isinstance(node.value, dict):
            return node
        fix = f"Write a path as {_TRAINING}: {{{CONFIG_FILE.name}: …}}, or DeepSpeed's keys below it."
        self.problems.append(Problem(node.where, _TRAINING, f"{show(node.plain())} is not a mapping of keys", fix))
        return Located({}, root.where)

    def _one_of(self, below: Located | None, above: Located | None) -> Located | None:
        """Return the DeepSpeed JSON's name, which may be below `deepspeed_config` or at the top level."""
        if below is not None and above is not None and below.value != above.value:
            message = f"{show(above.plain())} here, but {show(below.plain())} at {below.where}"
            self.problems.append(Problem(above.where, CONFIG_FILE.name, message, "Keep one of the two."))
        return below or above

    def _named_file(self, named: Located | None, folder: Path) -> Located:
        """Return the DeepSpeed configuration of a launch config, from its folder or from the working directory."""
        nothing = Located({}, "")
        if named is None or named.value in (None, "", "none", "None"):
            return nothing
        if isinstance(named.value, dict) and self.kind == "code":
            return named
        if not isinstance(named.value, str):
            message = f"{show(named.plain())} is not a path"
            self.problems.append(Problem(named.where, CONFIG_FILE.name, message, "Write the path of a DeepSpeed JSON."))
            return nothing
        wanted = Path(os.path.expanduser(named.value))  # noqa: PTH111 - Path's raises where there is no such home
        candidates = list(dict.fromkeys([folder / wanted, wanted]))
        existing = [path for path in candidates if os.path.isfile(path)]  # noqa: PTH113 - Path's raises for long names
        if not existing:
            looked = " or ".join(str(path) for path in candidates)
            self.problems.append(
                Problem(named.where, CONFIG_FILE.name, f"no file {looked}", nearest_file(candidates[0]))
            )
            return nothing
        if len({path.resolve() for path in existing}) > 1:
            message, fix = f"read {existing[0]}, not {existing[1]}", "Write the absolute path of the one you mean."
            self.notes.append(Problem(named.where, CONFIG_FILE.name, message, fix, show(named.value), "warning"))
        try:
            root = self.parse(existing[0])
        except ConfigError as error:
            self.problems += error.problems
            return nothing
        if _is_launch(root.value, existing[0]):
            message = f"{existing[0]} is a launch config, not a DeepSpeed configuration"
            self.problems.append(Problem(named.where, CONFIG_FILE.name, message, "Name a DeepSpeed JSON here."))
            return nothing
        return root

    def _training_layer(self, tree: Tree) -> Tree:
        tree, moved = one_spelling(tree)
        tree, read = read_as_wanted(tree, deepspeed_schema())
        self.notes += [*moved, *read]
        return tree

    def _launch_tree(self, tree: Tree) -> Tree:
        tree, read = read_as_wanted(tree, launch_schema())
        tree, notes = _precision_from_switch(tree)
        self._sort([*notes, *read, *ignored_keys(tree)])
        return tree

    def _merged(self, layers: list[Tree]) -> Tree:
        """Merge file, inline keys and short fields. A value replaces an open one. Different values are a problem."""
        merged = Tree()
        for layer in layers:
            taken: dict[KeyPath, Entry] = {}
            for path, entry in layer.entries.items():
                before = merged.get(*path)
                if before is None or before.value is AUTO:
                    taken[path] = entry
                elif entry.value is not AUTO and not same_value(before.value, entry.value):
                    message = f"{show(entry.value)} here, but {show(before.value)} at {before.origin.where}"
                    fix = "Keep one of the two, or write auto in the DeepSpeed JSON."
                    self.problems.append(Problem(entry.origin.where, layer.typed(*path), message, fix))
            merged = merged.replace(taken)
        return merged


def _precision_from_switch(launch: Tree) -> tuple[Tree, list[Problem]]:
    """Translate Accelerate's old top-level key `fp16` to `mixed_precision`, with a warning.

    Accelerate ignores `fp16` if `mixed_precision` is written too. Here the two must agree.
    """
    switch, precision = launch.get("fp16"), launch.get("mixed_precision")
    if switch is None or not isinstance(switch.value, bool):
        return launch, []
    where, shown, rest = switch.origin.where, show(switch.value), launch.without("fp16")
    if precision is None or precision.value is None:
        read = "fp16" if switch.value else "no"
        fix = f"Write mixed_precision: {read}."
        rest = rest.replace({("mixed_precision",): Entry(read, replace(switch.origin, key="fp16"))})
        return rest, [Problem(where, "fp16", "read as mixed_precision", fix, shown, "warning")]
    if switch.value == (precision.value == "fp16"):
        return rest, [Problem(where, "fp16", "has no effect with mixed_precision", "Delete it.", shown, "warning")]
    message = f"{shown}, but mixed_precision is {show(precision.value)} at {precision.origin.where}"
    return rest, [Problem(where, "fp16", message, "Delete it.")]


def _is_launch(keys: Mapping[str, Any], path: Path) -> bool:
    """Return whether most keys are Accelerate's launch keys, not DeepSpeed's. For a tie, decide by the extension."""
    if _TRAINING in keys:
        return True
    known = {*LAUNCH_KEYS, CONFIG_FILE.name}
    training = deepspeed_schema()["properties"]
    of_launch = sum(key in known for key in keys)
    of_training = sum(key in training for key in keys)
    if of_launch == of_training:
        short = any(key in SHORT_FIELDS and key not in training for key in keys)
        return short or path.suffix in (".yaml", ".yml")
    return of_launch > of_training


def _locate(value: Any, where: str, path: KeyPath) -> Located:
    """Convert a value from code to plain, located values: mappings, lists, and scalars, including NumPy's and paths."""
    if len(path) > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels"
        raise ConfigError([Problem(where, dotted(path[:3]) + "…", message, "No setting is so deep; flatten it.")])
    if isinstance(value, Mapping):
        return Located({str(k): _locate(child, where, (*path, str(k))) for k, child in value.items()}, where)
    if isinstance(value, list | tuple | set | frozenset):
        return Located([_locate(child, where, (*path, str(n))) for n, child in enumerate(value)], where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError([Problem(where, dotted(path), f"{value} is no number to set", "Pass a finite number.")])
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
