"""What resolution starts from, its working copy, and what it comes to.

Facts are plain numbers about the loop, the model and the machine. A `Draft` holds what is settled so far, what is wrong
and what to log. `Resolved` has no open field, and every value with its origin, which a run also records.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.installed import installed_version
from zero_plugin.config.keys import ACCUMULATION, CLIPPING, GLOBAL_BATCH, SEQUENCE, STAGE
from zero_plugin.config.schema import deepspeed_default, deepspeed_schema, is_passed_on
from zero_plugin.config.tree import Entry, KeyPath, Origin, OriginKind, Tree, dotted, freeze, holds_auto, plain, show
from zero_plugin.errors import ConfigError, Problem

Precision = Literal["no", "fp16", "bf16"]
StrategyName = Literal["deepspeed", "ddp", "single", "xla"]


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the training loop says.

    Attributes:
        micro_batch: samples per process and backward, None where no training loader tells.
        micro_batch_reason: how `micro_batch` was found, e.g. "the training DataLoader's batch_size".
        micro_batch_fixed: whether the loader states that size; false where it was only seen on one batch.
        batches_per_epoch: length of the prepared training loader on one process, None where unknown.
        batches_given: length of the training loader as the script gave it, in micro-batches, None where unknown.
    """

    micro_batch: int | None = None
    micro_batch_reason: str = ""
    micro_batch_fixed: bool = True
    batches_per_epoch: int | None = None
    batches_given: int | None = None


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The optimizer handed to `prepare`.

    Attributes:
        name: DeepSpeed's type name in lower case (`adamw`, `sgd`, …); "" for a placeholder, which has none.
        given: the arguments that the user gave (placeholder: only what was typed; real optimizer: its defaults dict).
        group_lrs: learning rate of each parameter group, empty where none is known.
        placeholder: whether it is a DummyOptim.
        given_by: who gave the arguments, where it is neither a placeholder nor the loop's optimizer.
    """

    name: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    group_lrs: tuple[float, ...] = ()
    placeholder: bool = False
    given_by: str = ""

    @property
    def giver(self) -> str:
        """Who gave the arguments, for sentences."""
        return self.given_by or ("DummyOptim" if self.placeholder else f"the loop's {self.name}")


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """The scheduler handed to `prepare`.

    Attributes:
        placeholder: whether it is a DummyScheduler without a callable.
        total_num_steps, warmup_num_steps: as typed, in the user's own counting; None where not given.
        given: further keyword arguments of the placeholder.
        given_by: who gave all of them, for sentences.
    """

    placeholder: bool = False
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    given_by: str = "DummyScheduler"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model without touching its data.

    Attributes:
        hidden_size: of the residual stream, None where it could not be found.
        hidden_size_reason: how it was found, e.g. "model.config.text_config.hidden_size".
        largest_parameter: elements of the largest parameter tensor, 0 where unknown.
        parameters: elements of all parameters, shared ones counted once; 0 where unknown.
    """

    hidden_size: int | None = None
    hidden_size_reason: str = ""
    largest_parameter: int = 0
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the processes run on.

    Attributes:
        accelerator: device kind of this run.
        processes: data-parallel world size: of processes that share their samples, a group counts once.
        intended: what `processes` is meant to be, where the run resumes with fewer; 0: as many as there are.
        shared_by: how many processes share each sample (`sequence_parallel_size`).
        bf16, fp16: whether the device computes in these types (under DeepSpeed, for fp16).
    """

    accelerator: Literal["cpu", "cuda", "xla"] = "cpu"
    processes: int = 1
    bf16: bool = True
    fp16: bool = False
    intended: int = 0
    shared_by: int = 1

    @property
    def all_processes(self) -> int:
        """The number of processes, over which ZeRO partitions."""
        return self.processes * self.shared_by

    @property
    def counted(self) -> int:
        """The number of processes by which schedules count: that of the start, so that the curve stays the same."""
        return self.intended or self.processes


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one `prepare`; None where that part does not exist in the call.

    Attributes:
        complete: false before a run, when a loop, a model or an optimizer that is absent here may still come.
        planned: what the plan of the memory has chosen for open fields: by path, the value and why; empty where no plan
            was made.
    """

    loop: LoopFacts = field(default_factory=LoopFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    model: ModelFacts | None = None
    optimizer: OptimizerFacts | None = None
    scheduler: SchedulerFacts | None = None
    split_batches: bool = False
    strategy: StrategyName = "deepspeed"
    complete: bool = True
    planned: Mapping[KeyPath, tuple[Any, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """A config's `optimizer` or `scheduler` section, resolved: `type` as written, `params` with every default written
    out. A schedule's step numbers are applied optimizer steps."""

    type: str
    params: Mapping[str, Any]


OptimizerSection = Section
SchedulerSection = Section


@dataclass(frozen=True)
class Resolved:
    """What `prepare` runs; everything else is read off the two trees, so that there is one source of truth.

    Attributes:
        document: what was configured.
        facts: what it was resolved from.
        tree: the complete training configuration under DeepSpeed's key names; no leaf holds AUTO but where AUTO is
            DeepSpeed's own value.
        launch: the launch keys that change training: `mixed_precision` and `scheduler_counts`.
        logged: one sentence for each choice made for the user that changes training, to log once at start.
        missing: where the facts were not complete, the fields that a run may still fill, each with what would: they
            hold AUTO or are absent. A run has none.
    """

    document: Document
    facts: Facts
    tree: Tree
    launch: Tree
    logged: tuple[str, ...]
    missing: Mapping[KeyPath, str]

    @property
    def precision(self) -> Literal["no", "fp16", "bf16"]:
        """Computation type; "no" is fp32."""
        if self.tree.value("fp16", "enabled"):
            return "fp16"
        return "bf16" if self.tree.value("bf16", "enabled") else "no"

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step, at least 1."""
        return int(self.tree.value(*ACCUMULATION.path, default=1))

    @property
    def clipping(self) -> float | None:
        """Largest gradient norm, None for no clipping."""
        return float(self.tree.value(*CLIPPING.path) or 0.0) or None

    @property
    def optimizer(self) -> Section | None:
        """The optimizer that the configuration describes, None where it describes none."""
        return self._section("optimizer")

    @property
    def scheduler(self) -> Section | None:
        """The schedule that the configuration describes, None where it describes none."""
        return self._section("scheduler")

    @property
    def scheduler_counts(self) -> Literal["steps", "processes"]:
        """How a prepared schedule counts: once per applied optimizer step, or Accelerate's way, W times."""
        return "steps" if self.launch.value("scheduler_counts") == "steps" else "processes"

    @property
    def zero_stage(self) -> int:
        """The configured ZeRO stage; 0 where there is no ZeRO."""
        return int(self.tree.value(*STAGE.path, default=0))

    def offload_device(self, what: Literal["optimizer", "param"]) -> Literal["none", "cpu", "nvme"]:
        """Where the optimizer states (or the parameters) live."""
        device = self.tree.value("zero_optimization", f"offload_{what}", "device", default="none")
        return device or "none"

    def deepspeed_config(self) -> dict[str, Any]:
        """The dict for `deepspeed.initialize`: plain JSON values, `"auto"` only where it is DeepSpeed's own value.

        It holds no `scheduler` section: this package builds and steps the learning-rate scheduler itself, and an
        engine that found the section would step a second one; nor defaults that DeepSpeed refuses in writing; nor that
        processes share samples, of which an engine need not know: it would count the global batch by all processes.
        """
        passed = self.tree.without("scheduler").where(lambda path, entry: is_passed_on(path, entry.value))
        passed = passed.without(*SEQUENCE.path).without("data_parallel_size")
        if self.facts.machine.shared_by > 1:
            passed = passed.without(*GLOBAL_BATCH.path)
        return passed.nested(auto="auto")

    @functools.cached_property  # each save writes it again
    def record(self) -> Mapping[str, Any]:
        """For a file: versions, where it runs, every value with its origin, what DeepSpeed gets (null without it)."""
        return {
            "versions": {package: installed_version(package) for package in ("zero-plugin", "deepspeed", "torch")},
            "files": list(self.document.sources),
            "strategy": self.facts.strategy,
            "accelerator": self.facts.machine.accelerator,
            "processes": self.facts.machine.all_processes,
            "values": [row.as_json() for row in list_values(self.document, self)],
            "deepspeed_config": self.deepspeed_config() if self.facts.strategy == "deepspeed" else None,
        }

    def _section(self, name: Literal["optimizer", "scheduler"]) -> Section | None:
        section = self.tree.section(name).nested()
        return None if section.get("type") is None else Section(section["type"], section.get("params") or {})


class Draft:
    """The working copy that the rules fill, topic after topic; the document itself never changes.

    Attributes:
        document: what was configured.
        facts: what the rules may look at besides the values.
        tree, launch: the trees as far as they are settled.
    """

    def __init__(self, document: Document, facts: Facts) -> None:
        self.document = document
        self.facts = facts
        self.tree = document.deepspeed
        self.launch = document.launch
        self._problems: list[Problem] = []
        self._missing: dict[KeyPath, str] = {}
        self._refused: set[KeyPath] = set()
        self._logged: list[str] = []

    @property
    def on_deepspeed(self) -> bool:
        """Whether the run goes through DeepSpeed's engine."""
        return self.facts.strategy == "deepspeed"

    def get(self, *path: str) -> Entry | None:
        """The settled leaf at `path`; None where it is absent, null or still open."""
        entry = self.tree.get(*path)
        return None if entry is None or entry.value is None or holds_auto(entry.value) else entry

    def value(self, *path: str, default: Any = None) -> Any:
        """The settled value at `path`, or `default`."""
        entry = self.get(*path)
        return default if entry is None else entry.value

    def is_open(self, *path: str) -> bool:
        """Whether the leaf is `auto`, or a list that contains it."""
        return path in self.tree and holds_auto(self.tree.value(*path))

    def is_missing(self, *path: str) -> bool:
        """Whether the leaf stays open, since a fact is not there; see `miss`."""
        return path in self._missing

    def is_unsettled(self, *path: str) -> bool:
        """Whether a rule has still to find this value: it is absent or open."""
        return path not in self.tree or self.is_open(*path)

    def put(self, path: KeyPath, value: Any, reason: str, kind: OriginKind = "rule", *, logged: bool = False) -> None:
        """Settle `path`. Of a list such as `["auto", 0.95]` only the open elements are taken from `value`.

        Args:
            path: where.
            value: what; lists become tuples.
            reason: why this value, for `explain`.
            kind: "rule", or "default" for a value that DeepSpeed would have taken too.
            logged: whether the choice changes training and has to be logged at start.
        """
        before, value = self.tree.get(*path), freeze(value)
        if before is not None and isinstance(before.value, tuple) and holds_auto(before.value):
            template = before.value
            if not isinstance(value, tuple) or len(value) != len(template):
                fix = f"Write the complete list, or auto in its place, which is {show(value)}: {reason}."
                self.refuse(path, f"{show(template)} has an open element that nothing fills.", fix)
                return
            value = tuple(found if holds_auto(typed) else typed for typed, found in zip(template, value, strict=True))
            reason += "; the other elements are typed"
        self.tree = self.tree.replace({path: self._entry(path, value, reason, kind)})
        if logged:
            self.log(f"{dotted(path)} = {_shown(value)}: {reason}")

    def put_default(self, path: KeyPath, what: str, fix: str) -> None:
        """Settle a parameter that no rule fills as DeepSpeed's default; without one it stays open, see `miss`."""
        default = deepspeed_default(path, self.value(path[0], "type"))
        if default is None:
            self.miss(path, what, fix)
        else:
            self.put(path, default[0], "no rule fills it", "default")

    def keys(self, *section: str) -> list[str]:
        """The keys written in a section that holds plain values; none where it is absent, null or empty."""
        return [path[-1] for path in self.tree if path[:-1] == section]

    def put_launch(self, key: str, value: Any, reason: str, *, logged: bool = False) -> None:
        """Settle a launch key; see `put`."""
        self.launch = self.launch.replace({(key,): self._entry((key,), value, reason, "rule")})
        if logged:
            self.log(f"{key} = {value}: {reason}")

    def log(self, sentence: str) -> None:
        """Note a choice that has to be logged once at start."""
        self._logged.append(sentence)

    def refuse(self, path: KeyPath, message: str, fix: str) -> None:
        """Note a problem that no further fact fixes; `finish` raises all of them at once."""
        tree = self.tree if path in self.tree else self.launch
        entry = tree.get(*path)
        found = entry.origin.where if entry else self.document.place(("deepspeed", *path))
        self.add(Problem(found, tree.typed(*path), message, fix))
        self._refused.add(path)

    def add(self, problem: Problem) -> None:
        """Note a problem as it was found elsewhere, once; see `refuse`."""
        if problem not in self._problems:
            self._problems.append(problem)

    def miss(self, path: KeyPath, what: str, fix: str) -> None:
        """Note a field that stays open because a fact is not there: an error in a run, before one only open.

        Args:
            path: where.
            what: what would fill it, to follow "there is no …".
            fix: what to write or pass.
        """
        if self.facts.complete:
            state = "auto" if self.is_open(*path) else "absent"
            self.refuse(path, f"{state}, and there is no {what}.", fix)
        else:
            self._missing[path] = what
            self._refused.add(path)

    def still_open(self) -> list[KeyPath]:
        """The open leaves for which no rule has found a value or a problem, there or with their section's type."""
        refused = self._refused
        return [p for p in self.tree if self.is_open(*p) and p not in refused and (p[0], "type") not in refused]

    def finish(self) -> Resolved:
        """The resolved configuration; before a run, with the fields that it may still fill.

        Raises:
            ConfigError: listing every problem that the rules found.
        """
        if self._problems:
            raise ConfigError(self._problems)
        kept = {key: self.launch.entries[(key,)] for key in ("mixed_precision", "scheduler_counts")}
        launch = Tree({(key,): entry for key, entry in kept.items()})
        return Resolved(self.document, self.facts, self.tree, launch, tuple(self._logged), self._missing)

    @staticmethod
    def _entry(path: KeyPath, value: Any, reason: str, kind: OriginKind) -> Entry:
        where = "DeepSpeed's default" if kind == "default" else f"rule for {dotted(path)}"
        return Entry(freeze(value), Origin(kind, where, reason))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Row:
    """One value.

    Attributes:
        path: the key; launch keys have one part.
        value: plain; `"auto"` where it is open, or DeepSpeed's own word.
        kind: who set it; `open` for what only a run can fill, `unset` for DeepSpeed's default of a key nobody wrote.
        where: where it, or the `auto` that was filled, is written; "" for what was added.
        reason: why this value, for what nobody typed; of an open one, what would fill it.
        was_auto: whether it fills an `auto`.
    """

    path: KeyPath
    value: Any
    kind: Literal["file", "flag", "code", "rule", "default", "open", "unset"]
    where: str
    reason: str = ""
    was_auto: bool = False

    def as_json(self) -> dict[str, Any]:
        """The row for a JSON file."""
        shown = {name: getattr(self, name) for name in ("value", "kind", "where", "reason")}
        return {"path": dotted(self.path), **shown}


def list_values(document: Document, resolved: Resolved) -> list[Row]:
    """Every value: the launch keys, then the training keys, in the order of the file; what was added follows.

    Args:
        document: what was configured.
        resolved: what it was resolved to.
    """
    launch = document.launch.replace(resolved.launch.entries)
    missing = dict(resolved.missing)
    rows = [_row(path, entry, document.launch, missing) for path, entry in launch.entries.items()]
    rows += [_row(path, entry, document.deepspeed, missing) for path, entry in resolved.tree.entries.items()]
    return [*rows, *(Row(path, "auto", "open", "", what) for path, what in missing.items())]


def list_defaults(resolved: Resolved) -> list[Row]:
    """DeepSpeed's default of every key that is neither written nor added."""
    kind = resolved.tree.value("optimizer", "type")
    absent = [path for path in _keys(deepspeed_schema()) if path not in resolved.tree and path not in resolved.missing]
    return [unset_row(path, kind) for path in absent if deepspeed_default(path, kind) is not None]


def unset_row(path: KeyPath, kind: str | None) -> Row:
    """A key that nobody wrote, with DeepSpeed's default where one is known; `kind` as `deepspeed_default` takes it."""
    default = deepspeed_default(path, kind)
    return Row(path, default[0] if default else None, "unset", "", "nobody wrote the key")


def _row(path: KeyPath, entry: Entry, asked: Tree, missing: dict[KeyPath, str]) -> Row:
    """One row; a missing value that has a leaf is taken out of `missing`."""
    written = asked.get(*path)
    place = "" if written is None else written.origin.where
    what = missing.pop(path, None)
    if what is not None:
        return Row(path, plain(entry.value), "open", place, what, was_auto=True)
    was_auto = written is not None and holds_auto(written.value) and not entry.origin.typed_by_user
    where = entry.origin.where if entry.origin.typed_by_user else place
    return Row(path, plain(entry.value), entry.origin.kind, where, entry.origin.reason, was_auto)


def _keys(section: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, child in section.get("properties", {}).items():
        if "default" in child:
            yield (*path, name)
        yield from _keys(child, (*path, name))
