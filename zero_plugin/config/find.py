"""Sources of a process's configuration, and their precedence.

A command without a named file uses a default file. A worker uses the document from its launcher (or Accelerate's
environment variables) and the configuration named in code. Precedence, lowest first: defaults, file, launch flags,
arguments in code. Arguments in code fill open values, and must agree with set values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.amounts import as_number
from zero_plugin.config.check import check_document
from zero_plugin.config.choices import FALSE_WORDS, TRUE_WORDS
from zero_plugin.config.document import Document, Said, from_environment, one_spelling
from zero_plugin.config.keys import CONFIG_FILE, LAUNCH, LAUNCH_FIELDS, SHORT_FIELDS, TRAINING
from zero_plugin.config.launch_settings import LAUNCH_KEYS, launch_schema
from zero_plugin.config.located import parse_yaml
from zero_plugin.config.parallelism import DATA_PARALLEL_ONLY
from zero_plugin.config.read import document_from_code, document_from_mapping
from zero_plugin.config.run_files import cache_folder
from zero_plugin.config.schema import deepspeed_schema
from zero_plugin.config.tree import AUTO, Entry, KeyPath, OriginKind, Tree, read_as_wanted, same_value, show
from zero_plugin.errors import ConfigError, Problem

CONFIG_VARIABLE: Final = "ZERO_PLUGIN_CONFIG_FILE"

_OF_ACCELERATE: Final = ("default_config.yaml", "default_config.yml", "default_config.json")


def default_config_file(environ: Mapping[str, str]) -> Path:
    """Return the user's default file, whether it exists or not: `$HF_HOME/zero_plugin/default_config.yaml`."""
    return _hugging_face_home(environ) / "zero_plugin" / "default_config.yaml"


def find_config_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file for a command that names none, or None.

    In this order: the file in `$ZERO_PLUGIN_CONFIG_FILE`, whether it exists or not; the user's default file; the
    default file that `accelerate config` wrote.
    """
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    accelerate = _hugging_face_home(environ) / "accelerate"
    candidates = [default_config_file(environ), *(accelerate / name for name in _OF_ACCELERATE)]
    # os.access, because Path.is_file raises if a parent folder may not be searched
    return next((path for path in candidates if os.access(path, os.F_OK)), None)


def _hugging_face_home(environ: Mapping[str, str]) -> Path:
    """Return the folder that Hugging Face's libraries share, found by their rule."""
    home = environ.get("HF_HOME") or cache_folder(environ) / "huggingface"
    return Path(os.path.expanduser(home))  # noqa: PTH111 - Path.expanduser raises for a user without a home


_HERE: Final = "the environment"
_ZERO: Final = "ACCELERATE_DEEPSPEED_"

_DEVICE: Final = "ACCELERATE_TORCH_DEVICE"
_PARALLELISM: Final = "PARALLELISM_CONFIG_"  # prefix of the variables that ACCELERATE_USE_PARALLELISM_CONFIG enables
# Keys by variable. `_LAUNCH` holds keys at the top of a launch config; Accelerate's launcher exports them as `no` and
# `false` if they are not configured. `_BELOW` holds keys below `deepspeed_config`.
_LAUNCH: Final = {key.variable: key.name for key in LAUNCH.values() if key.variable and key.name not in LAUNCH_FIELDS}
_BELOW: Final = {
    key.variable: key.typed
    for key in (CONFIG_FILE, *TRAINING, *LAUNCH.values())
    if key.variable and key.variable not in _LAUNCH
}
_REFUSED: Final = {
    "ACCELERATE_USE_FSDP": "Launch with DeepSpeed and zero_stage 3, which shards the same states as FSDP's FULL_SHARD.",
    "ACCELERATE_USE_MEGATRON_LM": "Launch with DeepSpeed; tensor and pipeline parallelism are not supported.",
}


def document_from_accelerate(environ: Mapping[str, str]) -> Document | None:
    """Return the document that `ACCELERATE_*` variables describe, at the precedence of launch flags.

    Return None if no variable describes one.

    Raises:
        ConfigError: a variable requests a feature that this package lacks, or the DeepSpeed file cannot be read.
    """
    true = {name for name, value in environ.items() if value.lower() in TRUE_WORDS}
    shares, on_deepspeed = "ACCELERATE_USE_PARALLELISM_CONFIG" in true, "ACCELERATE_USE_DEEPSPEED" in true
    device = environ.get(_DEVICE, "").lower()
    refused = {name: fix for name, fix in _REFUSED.items() if name in true}
    if shares:
        sizes = (f"{_PARALLELISM}TP_SIZE", f"{_PARALLELISM}CP_SIZE")
        refused |= {name: DATA_PARALLEL_ONLY for name in sizes if environ.get(name, "1") != "1"}
    if device not in ("", "cpu") and re.fullmatch(r"cuda(:\d+)?", device) is None:
        refused[_DEVICE] = f"Write {_DEVICE}=cpu, or {_DEVICE}=cuda:0 for a GPU by its number."
    if refused:
        messages = {name: f"{environ[name]} is not supported" for name in refused}
        raise ConfigError([Problem(_where(name), "", messages[name], fix) for name, fix in refused.items()])
    launch = {name: key for name, key in _LAUNCH.items() if environ.get(name, "").lower() not in ("", *FALSE_WORDS)}
    unread = (*([] if on_deepspeed else [_ZERO]), *([] if shares else [_PARALLELISM]))
    training = {
        name: key
        for name, key in _BELOW.items()
        if environ.get(name, "") not in ("", "none") and not name.startswith(unread)
    }
    if not launch and not training and not on_deepspeed and device != "cpu":
        return None
    said: dict[str, Any] = {key: _read(environ[name]) for name, key in launch.items()}
    names = {key: name for name, key in {**launch, **training}.items()}
    if device == "cpu":
        said["use_cpu"], names["use_cpu"] = True, _DEVICE
    if on_deepspeed:
        said["distributed_type"], names["distributed_type"] = "DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"
    said["deepspeed_config"] = {key: _read(environ[name]) for name, key in training.items()}
    document = document_from_mapping(said, _HERE)
    return replace(document, launch=_marked(document.launch, names), deepspeed=_marked(document.deepspeed, names))


def _marked(tree: Tree, names: Mapping[str, str]) -> Tree:
    """Mark values of variables as a flag's, and values of the file that a variable names as a file's."""
    marked = {}
    for path, entry in tree.entries.items():
        if entry.origin.kind == "code":
            by_variable = entry.origin.where == _HERE
            kind: OriginKind = "flag" if by_variable else "file"
            where = _where(names[tree.typed(*path)]) if by_variable else entry.origin.where
            marked[path] = Entry(entry.value, replace(entry.origin, kind=kind, where=where))
    return tree.replace(marked)


def _where(name: str) -> str:
    return f"environment variable {name}"


def _read(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = as_number(text)
    return text if number is None else number


def find_document(config: str | Path | Mapping[str, Any] | None, environ: Mapping[str, str]) -> Document:
    """Return the launcher's document, overlaid with the configuration named in code.

    Args:
        config: path of a launch YAML or a DeepSpeed JSON, a dict with either content, or None.
        environ: environment with the launcher's document. Without a document of this package's launcher, Accelerate's
            variables are read.

    Raises:
        ConfigError: the configuration named in code has problems, or contradicts the launcher's.
    """
    launched = from_environment(environ) or document_from_accelerate(environ)
    if config is None:
        return launched or Document()
    return lay_document(launched or Document(), document_from_code(config, "Accelerator(config=…)"))


def lay_document(under: Document, own: Document) -> Document:
    """Lay `own`, a complete document from code, over `under` as arguments in code. Defaults of `own` only fill gaps.

    Raises:
        ConfigError: `own` has problems, or contradicts `under`.
    """
    if not under.launch and not under.deepspeed:
        return own
    check_document(own)  # reports every problem of `own`, also of values that `under` overrides
    entries = {**own.launch.entries, **own.deepspeed.under("deepspeed").entries}
    written = {
        path: Entry(entry.value, replace(entry.origin, kind="code", where=_place(entry.origin.where, own)))
        for path, entry in entries.items()
        if entry.origin.typed_by_user
    }
    laid = _agreed(under, under.lay(written))
    return replace(
        laid,
        launch=_with_defaults(laid.launch, own.launch),
        deepspeed=_with_defaults(laid.deepspeed, own.deepspeed),
        sources=(*under.sources, *own.sources),
        notes=(*laid.notes, *own.notes),
        sections={**own.sections, **under.sections},
    )


def _place(where: str, own: Document) -> str:
    """Return a place in a file that code named, or the call itself."""
    return f"{where}, named in code" if where.startswith(tuple(f"{source}:" for source in own.sources)) else where


def _with_defaults(laid: Tree, own: Tree) -> Tree:
    defaults = own.where(lambda path, entry: not entry.origin.typed_by_user and not laid.has_section(*path))
    return laid.replace(defaults.entries)


def overlay_flags(document: Document, said: Said) -> Document:
    """Lay launch flags over a document. A flag overrides the file.

    Args:
        document: the document from the file.
        said: values by flags such as `--zero_stage`; see `Document.overlay`.
    """
    return _read_laid(document.overlay("flag", said))


def overlay_code(document: Document, said: Said) -> Document:
    """Lay arguments in code over a document.

    Arguments fill open keys. For a key with a value they must give the same value, unless the launch key `prefer`
    (`code` or `file`) decides.

    Args:
        document: the document from file and flags.
        said: key → the call that gave it, such as `Accelerator(gradient_accumulation_steps=4)`, and the value.

    Returns:
        The merged document.

    Raises:
        ConfigError: arguments differ from values, and `prefer` is not set. Lists every such pair.
    """
    return _agreed(document, document.overlay("code", said))


def _agreed(document: Document, laid: Document) -> Document:
    """Return `laid` over `document`, if the two agree or `prefer` decides.

    Raises:
        ConfigError: the two differ, and `prefer` is not set.
    """
    laid = _read_laid(laid)
    prefer = document.launch.value("prefer") or laid.launch.value("prefer")
    found: list[Problem] = []
    launch = _keep_explicit(document.launch, laid.launch, prefer, found)
    deepspeed = _keep_explicit(document.deepspeed, laid.deepspeed, prefer, found)
    if errors := [problem for problem in found if problem.severity == "error"]:
        raise ConfigError(errors)
    if prefer in ("code", "file"):
        launch, deepspeed = _settle_precision(launch, deepspeed, prefer, found)
    return replace(laid, launch=launch, deepspeed=deepspeed, notes=(*laid.notes, *found))


def _settle_precision(launch: Tree, deepspeed: Tree, prefer: str, found: list[Problem]) -> tuple[Tree, Tree]:
    """Settle a `mixed_precision` of one side that contradicts `fp16.enabled` or `bf16.enabled` of the other."""
    for kind in ("fp16", "bf16"):
        chosen, switch = launch.get("mixed_precision"), deepspeed.get(kind, "enabled")
        if chosen is None or switch is None or not isinstance(switch.value, bool) or chosen.value in (None, AUTO):
            continue
        wanted, in_code = chosen.value == kind, chosen.origin.kind == "code"
        if switch.value == wanted or in_code == (switch.origin.kind == "code"):
            continue
        sides = ("mixed_precision", chosen), (f"{kind}.enabled", switch)
        (key, new), (_, old) = sides if in_code else sides[::-1]
        found.append(_difference(key, new, old, prefer))
        if in_code == (prefer == "code"):
            deepspeed = deepspeed.replace({(kind, "enabled"): Entry(wanted, chosen.origin)})
        else:
            launch = launch.without("mixed_precision")
    return launch, deepspeed


def _difference(key: str, new: Entry, old: Entry, prefer: Any) -> Problem:
    """Return an error for a value in code that differs from file or flag; a note if `prefer` decides."""
    in_code, other = f"{show(new.value)} in code", f"{show(old.value)} at {old.origin.where}"
    if prefer in ("code", "file"):
        counts, not_this = (in_code, other) if prefer == "code" else (other, in_code)
        message = f"{counts} counts, not {not_this}, since prefer is {prefer}"
        return Problem(new.origin.where, key, message, "", severity="note")
    fix = (
        "Write the same value in both, or auto in the file, or leave the argument out. To settle all such pairs, "
        "give --prefer code or --prefer file, or write prefer: into the config."
    )
    return Problem(new.origin.where, key, f"{in_code}, but {other}", fix)


def _read_laid(document: Document) -> Document:
    """Normalize the overlaid values of a document as a file's are: `BF16`, `2.0` for an integer."""
    launch, of_launch = read_as_wanted(document.launch, launch_schema())
    deepspeed, of_deepspeed = read_as_wanted(document.deepspeed, deepspeed_schema())
    notes = tuple(dict.fromkeys([*document.notes, *of_launch, *of_deepspeed]))
    return replace(document, launch=launch, deepspeed=deepspeed, notes=notes)


def _keep_explicit(before: Tree, after: Tree, prefer: Any, found: list[Problem]) -> Tree:
    """Return `after` with values of `before` if code repeats them or leaves them open, or if `prefer` is file."""
    kept: dict[KeyPath, Entry] = {}
    for path, old in before.entries.items():
        new = after.get(*path)
        if new is old or not old.origin.typed_by_user:
            continue
        if old.value is AUTO and new is not None and new.value is AUTO:
            kept[path] = old  # still open; keep the file's origin
            continue
        if old.value in (None, AUTO, {}):
            continue
        if new is None:  # code wrote null or a scalar instead of a mapping, or a key below this one
            new = next(entry for p, entry in after.entries.items() if p[: len(path)] == path or path[: len(p)] == p)
        if new.value is AUTO or same_value(old.value, new.value):
            kept[path] = old
        else:
            found.append(_difference(new.origin.key or before.typed(*path), new, old, prefer))
            if prefer == "file":
                kept[path] = old
    return after.replace(kept)


_BEFORE_TRAINING: Final = ("deepspeed_config", "deepspeed")  # optional prefixes of a training key, as in the YAML


def read_assignments(texts: Iterable[str], flag: str) -> Said:
    """Return the value of each key, in the form that `overlay_flags` takes.

    Args:
        texts: e.g. `zero_optimization.stage=3`, `zero_stage=3`, `optimizer.params.betas=[0.9, 0.95]`.
        flag: the flag that the texts were given to, for messages.

    Raises:
        ConfigError: a text is not `key=value`, or its value cannot be read.
    """
    said: dict[KeyPath, tuple[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            fix = f"Write {flag} zero_optimization.stage=3."
            raise ConfigError([Problem(flag, "", f"{text!r} is no key=value", fix)])
        place, problems = f"{flag} {key}", list[Problem]()
        read = parse_yaml(value, place, problems).plain()
        if problems:
            raise ConfigError(problems)
        path = path_of(tuple(key.split(".")))
        if path[0] == "deepspeed":
            tree, _ = one_spelling(Document().overlay("flag", {path: (place, read)}).deepspeed)
            said |= {("deepspeed", *leaf): (place, entry.value) for leaf, entry in tree.entries.items()}
        else:
            said[path] = (place, read)
    return said


def path_of(parts: KeyPath) -> KeyPath:
    """Return the path of a key for `Document.overlay`, from its name in a launch YAML, with or without prefix."""
    if len(parts) > 1 and parts[0] in _BEFORE_TRAINING:
        parts = parts[1:]
    elif parts[0] in LAUNCH_KEYS:
        return parts
    if len(parts) == 1 and parts[0] in SHORT_FIELDS:
        return ("deepspeed", *SHORT_FIELDS[parts[0]])
    return ("deepspeed", *parts)
