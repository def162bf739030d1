"""DeepSpeed's configuration as scripts pass it in and read it.

`HfDeepSpeedConfig` answers questions by dotted key, for scripts and transformers. `DeepSpeedPlugin` is a
configuration given in code, and the live view of the running one. `Configurations` holds one document, or one for
each plugin. A run follows one of them at a time.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import lay_document, overlay_code
from zero_plugin.config.keys import BATCH, TRAINING
from zero_plugin.config.launch_settings import asks_for_deepspeed, launch_settings
from zero_plugin.config.read import document_from_mapping, parse_file
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import AUTO, KeyPath, Origin, Tree, dotted, same_value, show
from zero_plugin.errors import ConfigError, Problem

_WHERE: Final = "DeepSpeedPlugin(…)"
# Keys that scripts look up whether or not they were written.
_ALWAYS_SHOWN: Final = dict.fromkeys((key.name for key in BATCH), "auto")
# By field: its key, and the value to show if the key is absent.
_FIELDS: Final = {
    key.field: (key.name, "auto" if key.filled_by == "loop" else (deepspeed_default(key.path) or (None,))[0])
    for key in TRAINING
    if key.field
}


class HfDeepSpeedConfig:
    """A DeepSpeed configuration as a plain dict.

    Args:
        config_file_or_dict: path of a DeepSpeed JSON, a dict (copied), or the JSON's text, plain or as URL-safe base64.

    Attributes:
        config: the dict. Answers follow its changes.

    Raises:
        ConfigError: the argument is none of these.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        parsed = parse_configuration(config_file_or_dict)
        self.config: dict[str, Any]
        if isinstance(parsed, dict):
            self.config = parsed
        else:
            problems: list[Problem] = []
            self.config = parse_file(Path(parsed), problems).plain()
            if problems:
                raise ConfigError(problems)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict for a dotted key, with the key's last part. The dict is None if it is missing."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key, e.g. `zero_optimization.stage`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key and everything below it.

        Raises:
            ValueError: the key is missing, and `must_exist` is true.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"there is no {ds_key_long} in the DeepSpeed configuration.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the key exists and is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the key exists and is not true."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the ZeRO stage is 2."""
        return bool(self.get_value("zero_optimization.stage", -1) == 2)

    def is_zero3(self) -> bool:
        """Return whether the ZeRO stage is 3."""
        return bool(self.get_value("zero_optimization.stage", -1) == 3)

    def is_offload(self) -> bool:
        """Return whether optimizer states or parameters are offloaded."""
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in ("cpu", "nvme") for device in devices)


def parse_configuration(given: Any) -> dict[str, Any] | str:
    """Return a copy of a DeepSpeed configuration's keys, or the path of its file.

    Args:
        given: see `HfDeepSpeedConfig`. Its objects, and transformers', are also accepted.

    Raises:
        ConfigError: the argument is neither keys nor a path nor a configuration's text.
    """
    config = getattr(given, "config", given)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, os.PathLike):
        return str(os.fspath(config))
    if not isinstance(config, str):
        fix = "Pass the path of a DeepSpeed JSON, or a dict."
        raise ConfigError([Problem("hf_ds_config", "", f"a {type(config).__name__} is no configuration", fix)])
    for text in (config, _decoded(config)):
        if text.lstrip().startswith("{"):
            try:
                parsed: dict[str, Any] = json.loads(text)
            except ValueError as error:
                fix = "Pass complete JSON, or the path of a file."
                raise ConfigError([Problem("hf_ds_config", "", f"broken JSON: {error}", fix)]) from None
            return parsed
    return config


def _decoded(text: str) -> str:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


@dataclass
class DeepSpeedPlugin:
    """A DeepSpeed configuration in code: a complete one, short fields, or both if they agree.

    Fields that are None or `auto` are filled from the launch configuration and the loop. Once passed to `Accelerator`,
    the plugin shows the running configuration. The next `prepare` follows changes that a script makes in
    `deepspeed_config`.

    Attributes:
        hf_ds_config: path of a DeepSpeed JSON, a dict, or an `HfDeepSpeedConfig`; afterwards always the latter.
        gradient_accumulation_steps: micro-batches per optimizer step.
        gradient_clipping: largest gradient norm.
        zero_stage: 0 to 3; if not set, 2, or DeepSpeed's default 0 with an `hf_ds_config`.
        is_train_batch_min: only True is supported: the training loader's batch size counts, not that of other loaders.
        offload_optimizer_device, offload_param_device: `none`, `cpu` or `nvme`.
        offload_optimizer_nvme_path, offload_param_nvme_path: folders for `nvme`.
        zero3_init_flag: whether transformers' `from_pretrained` builds models partitioned at stage 3.
        zero3_save_16bit_model: whether DeepSpeed's own saving gathers the weights at stage 3.
        transformer_moe_cls_names: classes of mixture-of-experts layers, comma-separated, in addition to those detected
            by their structure.
        enable_msamp, msamp_opt_level: refused, because fp8 is not supported.
        deepspeed_config: the configuration as a dict with `auto` for open fields.

    Raises:
        ConfigError: the configuration has problems. Lists all of them.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | str | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        self._refuse_without_meaning()
        given = {name: getattr(self, name) for name in (*_FIELDS, "zero3_init_flag")}
        given["deepspeed_moe_layer_cls_names"] = self.transformer_moe_cls_names
        training = {name: value for name, value in given.items() if value is not None}
        if self.hf_ds_config not in (None, "none"):
            training["deepspeed_config_file"] = parse_configuration(self.hf_ds_config)
        ignored = self._ignored_offload()
        if ignored:
            training = {name: value for name, value in training.items() if not name.startswith("offload_param_")}
        asked = {"distributed_type": "DEEPSPEED", "deepspeed_config": training}
        document = document_from_mapping(asked, _WHERE)
        self._document = replace(document, notes=(*document.notes, *ignored))
        self.deepspeed_config: dict[str, Any] = {}
        self.hf_ds_config = HfDeepSpeedConfig({})
        self.hf_ds_config.config = self.deepspeed_config
        self._selected = False
        self._pretrained: Callable[[bool], AbstractContextManager[None]] = lambda _: nullcontext()
        self.show(self._document)

    @property
    def document(self) -> Document:
        """The configuration in code, with later changes to `deepspeed_config`."""
        return self.follow(self._document)

    @property
    def selected(self) -> bool:
        """Whether `prepare` uses this plugin."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make the next `prepare` use this plugin. `accelerator.state.select_deepspeed_plugin(name)` calls this method.

        Raises:
            ValueError: a direct call, which would leave two plugins selected.
        """
        if not _from_accelerator_state:
            raise ValueError("call accelerator.state.select_deepspeed_plugin(name) to choose among several plugins.")
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the configuration, e.g. `zero_optimization.stage`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a dotted key is open."""
        return bool(self.get_value(ds_key_long) == "auto")

    def is_zero3_init_enabled(self) -> bool:
        """Return whether `from_pretrained` builds models partitioned."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Make transformers' `from_pretrained` partition models at stage 3, or not, inside this context."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            with self._pretrained(enable):
                yield
        finally:
            self.zero3_init_flag = before

    def show(self, document: Document, filled: Mapping[str, Any] | None = None) -> None:
        """Show `document`, in the same dict as before.

        Args:
            document: the configuration.
            filled: the training configuration with open fields filled; None shows them as `auto`.
        """
        config = {**_ALWAYS_SHOWN, **(document.to_deepspeed() if filled is None else filled)}
        self.deepspeed_config.clear()
        self.deepspeed_config.update(config)
        for field, (name, absent) in _FIELDS.items():
            setattr(self, field, self.get_value(name, absent))
        flag = document.launch.value("zero3_init_flag")
        self.zero3_init_flag = self.zero_stage == 3 if flag in (None, AUTO) else flag
        self._shown = copy.deepcopy(config)

    def build_pretrained_by(self, context: Callable[[bool], AbstractContextManager[None]]) -> None:
        """Set the context manager `context(enable)` that `zero3_init_context_manager` enters."""
        self._pretrained = context

    def follow(self, document: Document) -> Document:
        """Return `document` with changes to `deepspeed_config` since the last `show`.

        Raises:
            ConfigError: changes differ from explicit values of file or flag. Lists every such pair.
        """
        before, now = _as_tree(self._shown), _as_tree(self.deepspeed_config)
        changed = now.where(lambda path, entry: path not in before or not same_value(before.value(*path), entry.value))
        gone = [p for p in before if p not in now and not any(p == q[: len(p)] or q == p[: len(q)] for q in changed)]
        if not changed and not gone:
            return document
        training = document.deepspeed
        problems = []
        for path in (*changed, *gone):
            entry = training.get(*path)
            if entry is None:
                continue
            if path in changed and entry.origin.kind not in ("file", "flag"):
                training = training.without(*path)  # later code corrects earlier code
            elif path in gone and entry.value is not AUTO and entry.origin.kind in ("file", "flag"):
                message = f"deleted in code, but {show(entry.value)} at {entry.origin.where}"
                fix = "Delete it there, or write auto there."
                problems.append(Problem(_written(path), dotted(path), message, fix))
            elif path in gone:
                training = training.without(*path)
        if problems:
            raise ConfigError(problems)
        said = {("deepspeed", *path): (_written(path), entry.value) for path, entry in changed.entries.items()}
        return overlay_code(replace(document, deepspeed=training), said)

    def _ignored_offload(self) -> list[Problem]:
        """Warn about parameter offload in a call whose stage has none. Accelerate accepts that without effect."""
        if self.zero_stage not in (0, 1, 2) or self.offload_param_device in (None, "none", AUTO):
            return []
        message = f"{self.offload_param_device} has no effect: stage {self.zero_stage} does not partition parameters"
        fix = "Leave it out, or write zero_stage=3."
        return [Problem(_WHERE, "offload_param_device", message, fix, severity="warning")]

    def _refuse_without_meaning(self) -> None:
        problems = []
        if self.enable_msamp:
            fix = "Leave it out, and write mixed_precision='bf16'."
            problems.append(Problem("DeepSpeedPlugin(enable_msamp=True)", "", "MS-AMP is not supported", fix))
        if not self.is_train_batch_min:
            where, message = "DeepSpeedPlugin(is_train_batch_min=False)", "the training loader's batch size counts"
            problems.append(Problem(where, "", message, "Leave it out; prepare the training loader first of several."))
        if problems:
            raise ConfigError(problems)


def _as_tree(config: dict[str, Any]) -> Tree:
    return Tree.from_nested(config, lambda path: Origin("code", _written(path)))


def _written(path: KeyPath) -> str:
    return "deepspeed_config" + "".join(f"[{part!r}]" for part in path)


ONLY: Final = "default"  # name of a plugin that was given without one


class Configurations:
    """The documents of a run by plugin name. The run follows the selected plugin's document.

    Args:
        found: the document of launcher and file.
        plugins: the plugins in code; empty if there are none.
        overlay: lays the other arguments in code over a document.

    Attributes:
        plugins: a view of each document, the first one selected; empty for a run without DeepSpeed.
        in_code: whether the plugins come from code.

    Raises:
        ConfigError: the documents have problems. Lists all of them.
    """

    def __init__(
        self, found: Document, plugins: Mapping[str, DeepSpeedPlugin], overlay: Callable[[Document], Document]
    ) -> None:
        documents = {name: lay_document(found, plugin.document) for name, plugin in plugins.items()} or {ONLY: found}
        self._documents = {name: _checked(overlay(document), document) for name, document in documents.items()}
        self.in_code = bool(plugins)
        self.plugins = dict(plugins)
        only = self._documents.get(ONLY)
        if not plugins and only is not None and asks_for_deepspeed(only, launch_settings(only)):
            self.plugins = {ONLY: DeepSpeedPlugin()}
        for number, (name, plugin) in enumerate(self.plugins.items()):
            plugin.show(self._documents[name])
            plugin.select(_from_accelerator_state=True) if number == 0 else plugin._unselect()

    @property
    def document(self) -> Document:
        """The document that the next `prepare` follows."""
        return self._documents[self._selected]

    @property
    def plugin(self) -> DeepSpeedPlugin | None:
        """The view of that document; None for a run without DeepSpeed."""
        return self.plugins.get(self._selected)

    @property
    def _selected(self) -> str:
        return next((name for name, plugin in self.plugins.items() if plugin.selected), ONLY)

    def overlay(self, lay: Callable[[Document], Document]) -> None:
        """Lay further arguments in code over every document.

        Raises:
            ConfigError: the arguments differ from explicit values.
        """
        self._documents = {name: _checked(lay(document), document) for name, document in self._documents.items()}

    def follow_edits(self) -> Document:
        """Return the selected document with the script's changes to its plugin since the last `show`.

        Raises:
            ConfigError: a change differs from an explicit value of file or flag, or the result cannot run.
        """
        if self.plugin is not None:
            followed = self.plugin.follow(self.document)
            if followed is not self.document:
                self._documents[self._selected] = _checked(followed, self.document)
                self.plugin.show(self.document)
        return self.document

    def show(self, filled: Mapping[str, Any]) -> None:
        """Show a configuration with filled fields in the selected plugin."""
        if self.plugin is not None:
            self.plugin.show(self.document, filled)


def _checked(changed: Document, before: Document) -> Document:
    """Check the changed document. Return it with its findings, except those that the launcher has already logged."""
    logged = {note.remark for note in check_document(before)} - {note.remark for note in before.notes}
    notes = (note for note in check_document(changed) if note.remark not in logged)
    return replace(changed, notes=tuple(notes))
