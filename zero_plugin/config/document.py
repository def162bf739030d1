"""The document of a run: launch settings and the training configuration, with the place of every value.

Each key has one spelling here, whichever spelling was typed. A document can be written as a launch YAML with
Accelerate's keys, which YAML 1.1 and 1.2 read as the same values. The launcher passes the document to its workers in
one environment variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from zero_plugin.config import keys
from zero_plugin.config.keys import LAUNCH_FIELDS, SHORT_FIELDS, STAGE, ZERO
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, OriginKind, Tree, as_switch, dotted, freeze, show
from zero_plugin.errors import ConfigError, Problem, Severity

_PATHS: Final = tuple(key.path for key in keys.TRAINING)
_STAGE_3: Final = "stage3_"  # prefix of ZeRO keys that DeepSpeed also accepts without the prefix
# Other spellings that DeepSpeed still accepts: fields' names behind their aliases, and deprecated keys.
RENAMED_KEYS: Final[Mapping[KeyPath, KeyPath]] = {
    **{(ZERO, path[-1].removeprefix(_STAGE_3)): path for path in _PATHS if path[-1].startswith(_STAGE_3)},
    (ZERO, "stage3_gather_fp16_weights_on_model_save"): keys.SAVE_16BIT.path,
    ("aio", "thread_count"): ("aio", "intra_op_parallelism"),
    (ZERO, "cpu_offload"): keys.OFFLOAD_OPTIMIZER.path,
    (ZERO, "cpu_offload_param"): keys.OFFLOAD_PARAM.path,
    ("tensor_parallel", "tensor_parallel"): ("tensor_parallel", "tp"),
    ("tensor_parallel", "replace_with_kernel_inject"): ("tensor_parallel", "kernel_inject"),
    ("bfloat16",): ("bf16",),
}

# The deprecated ones of these: DeepSpeed warns about them, or drops their value.
_DEPRECATED: Final = (
    (ZERO,),
    ("aio", "thread_count"),
    (ZERO, "stage3_gather_fp16_weights_on_model_save"),
    (ZERO, "cpu_offload"),
    (ZERO, "cpu_offload_param"),
)


def translate_short_fields(fields: Mapping[KeyPath, Entry]) -> dict[KeyPath, Entry]:
    """Return short fields under their full key paths. An NVMe path of `none`, Accelerate's default, is left out."""
    return {
        SHORT_FIELDS[path[0]]: Entry(entry.value, replace(entry.origin, key=path[0]))
        for path, entry in fields.items()
        if not (path[0].endswith("nvme_path") and entry.value in (None, "", "none", "None"))
    }


def one_spelling(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return the tree with every key under its one spelling, and a finding for each key that was moved.

    A key is left in place if its other spelling is also written: the check then refuses the key as unknown. The same
    holds if a value is written instead of the new section, unless that value is null or empty.
    """
    entries: dict[KeyPath, Entry] = {}
    moved: dict[KeyPath, Entry] = {}
    notes: list[Problem] = []
    for path, entry in tree.entries.items():
        read, value, old = path, entry.value, path
        if path == (ZERO,) and isinstance(value, bool):  # the form from before ZeRO had stages
            read, value = STAGE.path, int(value)
        for other, new in RENAMED_KEYS.items():
            if path[: len(other)] == other and not tree.has_section(*new) and not _is_taken(tree, new):
                read, old = new + path[len(other) :], other
                if new[-1] == "device" and (value is None or as_switch(value) is not None):
                    value = "cpu" if as_switch(value) else "none"
                break
        if read == path:
            entries[path] = entry
        else:
            moved[read] = Entry(value, replace(entry.origin, key=dotted(path)))
            severity: Severity = "warning" if old in _DEPRECATED else "note"
            fix, shown = f"Write {dotted(read)}: {show(value)}.", show(entry.value)
            is_renamed = old == path and len(read) == len(path) and read[:-1] == path[:-1] and value == entry.value
            rename = read[-1] if is_renamed else ""
            message = f"read as {dotted(read)}"
            notes.append(Problem(entry.origin.where, dotted(path), message, fix, shown, severity, rename))
    return Tree(entries).replace(moved), notes


def _is_taken(tree: Tree, path: KeyPath) -> bool:
    above = [tree.entries[path[:n]].value for n in range(1, len(path)) if path[:n] in tree.entries]
    return any(value is not None and value != {} for value in above)


_LINE: Final = 120  # columns; a comment that would end beyond gets its own line

# Text that needs no quotes: no YAML parser reads it as a number, a date or an indicator.
_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+@=-]*|~/[A-Za-z0-9_./+@=-]*")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # not text in YAML 1.1
# Characters to escape: YAML cannot print them, or reads them as line breaks. `json.dumps` would not do: it writes
# surrogate pairs, which YAML does not join.
_TO_ESCAPE: Final = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def offload_devices(training: Tree) -> dict[str, Any]:
    """Return the offload device of `optimizer` and `param`: `none`, `cpu`, `nvme`, or AUTO."""
    return {what: training.value(ZERO, f"offload_{what}", "device") or "none" for what in ("optimizer", "param")}


def nvme_folders(training: Tree) -> list[str]:
    """Return the folders of NVMe offload, without duplicates. A folder that is still open is left out."""
    on_nvme = [what for what, device in offload_devices(training).items() if device == "nvme"]
    folders = [training.value(ZERO, f"offload_{what}", "nvme_path") for what in on_nvme]
    return list(dict.fromkeys(folder for folder in folders if isinstance(folder, str)))


def accelerate_values(launch: Tree, deepspeed: Tree) -> dict[str, Any]:
    """Return both parts of a document as plain nested values under Accelerate's keys; AUTO as `auto`.

    Training keys with a short field in Accelerate are written under that name, other keys under DeepSpeed's names.
    ZeRO without a stage is written as stage 0, which DeepSpeed runs: Accelerate would read a missing stage as 2.
    """
    top = launch.nested(auto="auto")
    below: dict[str, Any] = {name: top.pop(name) for name in LAUNCH_FIELDS if name in top}
    if top.get("distributed_type") == "DEEPSPEED" and not deepspeed.has_section(*STAGE.path):
        below[STAGE.field] = 0
    for name, path in SHORT_FIELDS.items():
        entry = deepspeed.get(*path)
        if entry is not None and translate_short_fields({(name,): entry}):
            below[name] = Tree({(name,): entry}).nested(auto="auto")[name]
            deepspeed = deepspeed.without(*path)
    below |= deepspeed.nested(auto="auto")
    return {**top, "deepspeed_config": below} if below else top


def yaml_text(values: Mapping[str, Any], comments: Mapping[KeyPath, str] = MappingProxyType({})) -> str:
    """Return plain nested values as YAML.

    Args:
        values: keys with numbers, text, booleans, None, lists and mappings.
        comments: one sentence for each key path, written next to the key.
    """
    return "\n".join(_lines(values, (), comments)) + "\n" if values else "{}\n"


def _lines(values: Mapping[str, Any], path: KeyPath, comments: Mapping[KeyPath, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in values.items():
        is_section = isinstance(value, Mapping) and value
        line = f"{indent}{_text(key)}:" if is_section else f"{indent}{_text(key)}: {_flow(value)}"
        comment = comments.get((*path, key))
        if comment and len(line) + len(comment) + 4 <= _LINE:
            yield f"{line}  # {comment}"
        else:
            yield from [f"{indent}# {comment}", line] if comment else [line]
        if is_section:
            yield from _lines(value, (*path, key), comments)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")  # YAML 1.1 reads a number without a point as text
        return mantissa + (".0" if "." not in mantissa else "") + e + exponent
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _TO_ESCAPE.sub(lambda found: f"\\U{ord(found[0]):08x}", escaped) + '"'


_TRAINING = "deepspeed"
Said = Mapping[KeyPath, tuple[str, Any]]  # by path: the flag or the call that set it, and the value


@dataclass(frozen=True, slots=True)
class Document:
    """The requested configuration of a run, before anything is resolved; open fields hold `AUTO`.

    Attributes:
        launch: Accelerate's launch keys by their own names, e.g. `("mixed_precision",)`, `("num_processes",)`.
        deepspeed: the training configuration under DeepSpeed's own key names. Runs without DeepSpeed use it too
            (accumulation, clipping, optimizer and scheduler sections).
        sources: the files that were read, in order, for messages.
        sections: the place of each key that holds keys, by path; training sections start with `deepspeed`.
        notes: warnings and notes, e.g. about keys without effect; a run prints each headline once.
        problems: errors after which reading could continue; `check_document` raises them together with its own.
    """

    launch: Tree = field(default_factory=Tree)
    deepspeed: Tree = field(default_factory=Tree)
    sources: tuple[str, ...] = ()
    sections: Mapping[KeyPath, str] = field(default_factory=dict)
    notes: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()

    def place(self, path: KeyPath) -> str:
        """Return the place of a leaf or section; for a missing one, the place of the section that lacks it.

        Args:
            path: the path of a launch key, or of a training key with `deepspeed` in front.
        """
        is_training = path[0] == _TRAINING and self.launch.get(*path) is None  # a file may have this key by mistake
        tree, root = (self.deepspeed, path[:1]) if is_training else (self.launch, ())
        path = path[len(root) :]
        if (entry := tree.get(*path)) is not None:
            return entry.origin.where
        for n in range(len(path), 0, -1):
            inside = (e.origin.where for p, e in tree.entries.items() if p[:n] == path[:n])
            if found := self.sections.get(root + path[:n]) or next(inside, ""):
                return found
        return self.sources[0] if self.sources else "the configuration"

    def overlay(self, kind: OriginKind, said: Said) -> Document:
        """Return a document with the values in `said` laid over this one (the later layer wins).

        Args:
            kind: the kind of the new layer.
            said: paths that start with `deepspeed` are training keys, other paths are launch keys.
        """
        entries: dict[KeyPath, Entry] = {}
        for path, (where, value) in said.items():
            origin = Origin(kind, where, key=_typed_key(where, path))
            tree = Tree.from_nested({"v": value}, lambda _, origin=origin: origin)  # type: ignore[misc]
            entries.update({path + leaf[1:]: entry for leaf, entry in tree.entries.items()})
        return self.lay(entries)

    def lay(self, entries: Mapping[KeyPath, Entry]) -> Document:
        """Return a document with `entries` laid over this one; see `overlay`."""
        launch = {path: entry for path, entry in entries.items() if path[0] != _TRAINING}
        deepspeed = {path[1:]: entry for path, entry in entries.items() if path[0] == _TRAINING}
        return replace(self, launch=self.launch.replace(launch), deepspeed=self.deepspeed.replace(deepspeed))

    def to_deepspeed(self) -> dict[str, Any]:
        """Return the training configuration as in a DeepSpeed JSON; an open field is `auto`.

        Raises:
            ConfigError: reading found problems, so the document may lack written values.
        """
        self._refuse_problems()
        return self.deepspeed.nested(auto="auto")

    def to_accelerate_yaml(self) -> str:
        """Return a launch YAML with Accelerate's keys. Comments and places of the document are lost.

        Raises:
            ConfigError: reading found problems, so the document may lack written values.
        """
        self._refuse_problems()
        return yaml_text(accelerate_values(self.launch, self.deepspeed))

    def _refuse_problems(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def _typed_key(where: str, path: KeyPath) -> str:
    """Return the spelling of `path` that the flag or assignment at `where` uses, if not the usual one; otherwise ""."""
    name = where.rpartition(" ")[2].removeprefix("--").removeprefix("deepspeed_config.")
    named = SHORT_FIELDS.get(name) or RENAMED_KEYS.get(tuple(name.split(".")))
    return name if named == path[1:] else ""


ENVIRONMENT_VARIABLE: Final = "ZERO_PLUGIN_DOCUMENT"

_LARGEST: Final = 128 * 1024 - len(ENVIRONMENT_VARIABLE) - 2  # Linux: MAX_ARG_STRLEN, 32 pages for `NAME=value\0`


def to_environment(document: Document, processes: int | None = None) -> str:
    """Return the document as compact JSON in ASCII, with its origins; `AUTO` stays distinct from any text.

    Args:
        document: a checked document.
        processes: the number of processes on all machines. It fills `num_processes` if the document leaves that open:
            workers compare it with the number of processes that have joined.

    Raises:
        ConfigError: the text is longer than an environment variable can be.
    """
    assert not document.problems, "a document is checked before it is handed over"
    if processes is not None and document.launch.value("num_processes") in (None, AUTO):
        started = Entry(processes, Origin("rule", "launch", "as many as are started"))
        document = replace(document, launch=document.launch.replace({("num_processes",): started}))
    text = json.dumps(
        {
            "launch": _encode_tree(document.launch),
            "deepspeed": _encode_tree(document.deepspeed),
            "sources": document.sources,
            "sections": [[path, where] for path, where in document.sections.items()],
            "notes": [astuple(note) for note in document.notes],
        },
        separators=(",", ":"),
        default=_tag,
    )
    if len(text) > _LARGEST:
        message = f"needs {len(text)} bytes to hand over to the workers"
        where = document.sources[0] if document.sources else "the configuration"
        raise ConfigError([Problem(where, "", message, f"Shorten it: the system takes at most {_LARGEST} bytes.")])
    return text


def from_environment(environ: Mapping[str, str]) -> Document | None:
    """Return the document that a launcher passed on, or None if there is none."""
    text = environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    data = json.loads(text, object_hook=_read_tag)
    return Document(
        launch=_decode_tree(data["launch"]),
        deepspeed=_decode_tree(data["deepspeed"]),
        sources=tuple(data["sources"]),
        sections={tuple(path): where for path, where in data["sections"]},
        notes=tuple(Problem(*row) for row in data["notes"]),
    )


def _encode_tree(tree: Tree) -> list[Any]:
    return [[path, entry.value, *astuple(entry.origin)] for path, entry in tree.entries.items()]


def _decode_tree(rows: list[Any]) -> Tree:
    return Tree({tuple(path): Entry(freeze(value), Origin(*origin)) for path, value, *origin in rows})


def _tag(value: Any) -> dict[str, Any]:
    """Encode AUTO, which JSON lacks, and a mapping as pairs, because its keys may look like these tags."""
    return {"auto": True} if value is AUTO else {"keys": list(value.items())}


def _read_tag(found: dict[str, Any]) -> Any:
    if "keys" in found:
        return dict(found["keys"])
    return AUTO if "auto" in found else found
