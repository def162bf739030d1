"""Input, working copy and result of resolution.

Facts are plain numbers about the loop, the model and the machine. A `Draft` holds settled values, problems, and
messages to log. `Resolved` has no open field, and an origin for every value, which a run records.
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
    """Facts about the training loop.

    Attributes:
        micro_batch: samples per process and backward, None if no training loader has it.
        micro_batch_reason: how `micro_batch` was found, e.g. "the training DataLoader's batch_size".
        micro_batch_fixed: whether the loader states that size; false if it was only seen on one batch.
        batches_per_epoch: length of the prepared training loader on one process, None if unknown.
        batches_given: length of the script's own training loader in micro-batches, None if unknown.
    """

    micro_batch: int | None = None
    micro_batch_reason: str = ""
    micro_batch_fixed: bool = True
    batches_per_epoch: int | None = None
    batches_given: int | None = None


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Facts about the optimizer passed to `prepare`.

    Attributes:
        name: DeepSpeed's type name in lower case (`adamw`, `sgd`, …); "" for a placeholder, which has none.
        given: arguments that the user gave (placeholder: only typed ones; real optimizer: its defaults dict).
        group_lrs: learning rate of each parameter group, empty if unknown.
        placeholder: whether the optimizer is a DummyOptim.
        given_by: the source of the arguments, if that is neither a placeholder nor the loop's optimizer.
    """

    name: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    group_lrs: tuple[float, ...] = ()
    placeholder: bool = False
    given_by: str = ""

    @property
    def giver(self) -> str:
        """The source of the arguments, for messages."""
        return self.given_by or ("DummyOptim" if self.placeholder else f"the loop's {self.name}")


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """Facts about the scheduler passed to `prepare`.

    Attributes:
        placeholder: whether the scheduler is a DummyScheduler without a callable.
        total_num_steps, warmup_num_steps: as typed, in the user's own counting; None if not given.
        given: further keyword arguments of the placeholder.
        given_by: the source of all of them, for messages.
    """

    placeholder: bool = False
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    given_by: str = "DummyScheduler"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model, found without touching its data.

    Attributes:
        hidden_size: of the residual stream, None if unknown.
        hidden_size_reason: how it was found, e.g. "model.config.text_config.hidden_size".
        largest_parameter: elements of the largest parameter tensor, 0 if unknown.
        parameters: elements of all parameters, shared ones counted once; 0 if unknown.
    """

    hidden_size: int | None = None
    hidden_size_reason: str = ""
    largest_parameter: int = 0
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about devices and processes.

    Attributes:
        accelerator: device kind of this run.
        processes: data-parallel world size; a group of processes that share their samples counts once.
        intended: the original `processes` of a run that resumes with fewer; 0 if there are no fewer.
        shared_by: number of processes that share each sample (`sequence_parallel_size`).
        bf16, fp16: whether the device computes in these dtypes (under DeepSpeed, for fp16).
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
        """The number of processes that schedulers count by. A resumed run keeps its number, to keep the curve."""
        return self.intended or self.processes


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one `prepare`; None for parts that the call does not have.

    Attributes:
        complete: false before a run, when a loop, a model or an optimizer may still follow.
        planned: the memory plan's values for open fields, by path, each with a reason; empty without a plan.
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
    """A resolved `optimizer` or `scheduler` section.

    `type` is as written, and `params` has every default written out. Step numbers are applied optimizer steps.
    """

    type: str
    params: Mapping[str, Any]


OptimizerSection = Section
SchedulerSection = Section


@dataclass(frozen=True)
class Resolved:
    """The resolved configuration of a run. All other values are read from the two trees, the only source of truth.

    Attributes:
        document: the configuration before resolution.
        facts: the facts that resolution used.
        tree: the complete training configuration under DeepSpeed's key names. A leaf holds AUTO only if AUTO is
            DeepSpeed's own value.
        launch: the launch keys that change training: `mixed_precision` and `scheduler_counts`.
        logged: one sentence for each choice that changes training, to log once at start.
        missing: fields that a run may still fill, if the facts were not complete, each with what would fill it. These
            fields hold AUTO or are absent. A run has none.
    """

    document: Document
    facts: Facts
    tree: Tree
    launch: Tree
    logged: tuple[str, ...]
    missing: Mapping[KeyPath, str]

    @property
    def precision(self) -> Literal["no", "fp16", "bf16"]:
        """The dtype of computation; "no" is fp32."""
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
        """The optimizer that the configuration describes, if any."""
        return self._section("optimizer")

    @property
    def scheduler(self) -> Section | None:
        """The learning-rate scheduler that the configuration describes, if any."""
        return self._section("scheduler")

    @property
    def scheduler_counts(self) -> Literal["steps", "processes"]:
        """The unit of a prepared scheduler: an optimizer step, or as in Accelerate a step of each process."""
        return "steps" if self.launch.value("scheduler_counts") == "steps" else "processes"

    @property
    def zero_stage(self) -> int:
        """The configured ZeRO stage; 0 without ZeRO."""
        return int(self.tree.value(*STAGE.path, default=0))

    def offload_device(self, what: Literal["optimizer", "param"]) -> Literal["none", "cpu", "nvme"]:
        """Return the offload device of the optimizer states or the parameters."""
        device = self.tree.value("zero_optimization", f"offload_{what}", "device", default="none")
        return device or "none"

    def deepspeed_config(self) -> dict[str, Any]:
        """Return the dict for `deepspeed.initialize`: JSON values, `"auto"` only if that is DeepSpeed's own value.

        Left out are:

        * the `scheduler` section: this package steps the scheduler, and the engine would step a second one
        * defaults that DeepSpeed refuses if they are written
        * sequence parallelism: the engine would count the global batch by all processes
        """
        passed = self.tree.without("scheduler").where(lambda path, entry: is_passed_on(path, entry.value))
        passed = passed.without(*SEQUENCE.path).without("data_parallel_size")
        if self.facts.machine.shared_by > 1:
            passed = passed.without(*GLOBAL_BATCH.path)
        return passed.nested(auto="auto")

    @functools.cached_property  # each save writes it again
    def record(self) -> Mapping[str, Any]:
        """The run's record for a file: versions, machine, values with origins, DeepSpeed's dict (or null)."""
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
    """The working copy that the rules fill, topic by topic. The document itself never changes.

    Attributes:
        document: the configuration before resolution.
        facts: facts that the rules may use in addition to the values.
        tree, launch: the trees with the values settled so far.
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
        """Return the settled leaf at `path`; None if it is absent, null or still open."""
        entry = self.tree.get(*path)
        return None if entry is None or entry.value is None or holds_auto(entry.value) else entry

    def value(self, *path: str, default: Any = None) -> Any:
        """Return the settled value at `path`, or `default`."""
        entry = self.get(*path)
        return default if entry is None else entry.value

    def is_open(self, *path: str) -> bool:
        """Return whether the leaf is `auto`, or a list that contains it."""
        return path in self.tree and holds_auto(self.tree.value(*path))

    def is_missing(self, *path: str) -> bool:
        """Return whether the leaf stays open because a fact is missing; see `miss`."""
        return path in self._missing

    def is_unsettled(self, *path: str) -> bool:
        """Return whether a rule still has to find this value: it is absent or open."""
        return path not in self.tree or self.is_open(*path)

    def put(self, path: KeyPath, value: Any, reason: str, kind: OriginKind = "rule", *, logged: bool = False) -> None:
        """Settle `path`. In a list such as `["auto", 0.95]`, only open elements are taken from `value`.

        Args:
            path: the key to settle.
            value: the new value; lists become tuples.
            reason: why this value, for `explain`.
            kind: "rule", or "default" for a value that DeepSpeed would have used too.
            logged: whether the choice changes training, so it is logged at start.
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
        """Settle a parameter without a rule with DeepSpeed's default. Without a default it stays open; see `miss`."""
        default = deepspeed_default(path, self.value(path[0], "type"))
        if default is None:
            self.miss(path, what, fix)
        else:
            self.put(path, default[0], "no rule fills it", "default")

    def keys(self, *section: str) -> list[str]:
        """Return the keys written in a section of plain values; none if it is absent, null or empty."""
        return [path[-1] for path in self.tree if path[:-1] == section]

    def put_launch(self, key: str, value: Any, reason: str, *, logged: bool = False) -> None:
        """Settle a launch key; see `put`."""
        self.launch = self.launch.replace({(key,): self._entry((key,), value, reason, "rule")})
        if logged:
            self.log(f"{key} = {value}: {reason}")

    def log(self, sentence: str) -> None:
        """Add a message about a choice, to log once at start."""
        self._logged.append(sentence)

    def refuse(self, path: KeyPath, message: str, fix: str) -> None:
        """Add a problem that no further fact can solve. `finish` raises all problems together."""
        tree = self.tree if path in self.tree else self.launch
        entry = tree.get(*path)
        found = entry.origin.where if entry else self.document.place(("deepspeed", *path))
        self.add(Problem(found, tree.typed(*path), message, fix))
        self._refused.add(path)

    def add(self, problem: Problem) -> None:
        """Add a problem from elsewhere, without duplicates; see `refuse`."""
        if problem not in self._problems:
            self._problems.append(problem)

    def miss(self, path: KeyPath, what: str, fix: str) -> None:
        """Leave a field open because a fact is missing. In a run this is an error.

        Args:
            path: the open field.
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
        """Return the open leaves without a value or a problem from any rule, in the leaf or its section's type."""
        refused = self._refused
        return [p for p in self.tree if self.is_open(*p) and p not in refused and (p[0], "type") not in refused]

    def finish(self) -> Resolved:
        """Return the resolved configuration, with the missing fields if this is before a run.

        Raises:
            ConfigError: the rules found problems. Lists all of them.
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
    """One value of the resolved configuration, for tables and records.

    Attributes:
        path: the key; launch keys have one part.
        value: a plain value; `"auto"` if it is open, or DeepSpeed's own word.
        kind: the kind of origin; `open` if only a run can fill it, `unset` for DeepSpeed's default of an absent key.
        where: the place of the value, or of the `auto` that it fills; "" for added values.
        reason: why this value, if no user typed it; for an open one, what would fill it.
        was_auto: whether the value fills an `auto`.
    """

    path: KeyPath
    value: Any
    kind: Literal["file", "flag", "code", "rule", "default", "open", "unset"]
    where: str
    reason: str = ""
    was_auto: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the row for a JSON file."""
        shown = {name: getattr(self, name) for name in ("value", "kind", "where", "reason")}
        return {"path": dotted(self.path), **shown}


def list_values(document: Document, resolved: Resolved) -> list[Row]:
    """Return every value: launch keys, then training keys, in the order of the file; added values follow.

    Args:
        document: the configuration before resolution.
        resolved: the result of resolution.
    """
    launch = document.launch.replace(resolved.launch.entries)
    missing = dict(resolved.missing)
    rows = [_row(path, entry, document.launch, missing) for path, entry in launch.entries.items()]
    rows += [_row(path, entry, document.deepspeed, missing) for path, entry in resolved.tree.entries.items()]
    return [*rows, *(Row(path, "auto", "open", "", what) for path, what in missing.items())]


def list_defaults(resolved: Resolved) -> list[Row]:
    """Return DeepSpeed's default for every key that is neither written nor added."""
    kind = resolved.tree.value("optimizer", "type")
    absent = [path for path in _keys(deepspeed_schema()) if path not in resolved.tree and path not in resolved.missing]
    return [unset_row(path, kind) for path in absent if deepspeed_default(path, kind) is not None]


def unset_row(path: KeyPath, kind: str | None) -> Row:
    """Return the row of an absent key, with DeepSpeed's default if known; for `kind` see `deepspeed_default`."""
    default = deepspeed_default(path, kind)
    return Row(path, default[0] if default else None, "unset", "", "the key is absent")


def _row(path: KeyPath, entry: Entry, asked: Tree, missing: dict[KeyPath, str]) -> Row:
    """Return one row. If the value is missing and has a leaf, remove it from `missing`."""
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
