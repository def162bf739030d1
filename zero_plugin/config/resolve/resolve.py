"""Resolution from beginning to end: in a run, before one, listed, and for scripts of other layers.

Turns a document and the facts of one `prepare` into a configuration without open fields.

Resolves before any worker exists, and finds what no loop, model or learning-rate scheduler can fix.

A resolved configuration as a list of values, each with where it came from, for people and for files.

The DeepSpeed configuration for a script built on Accelerate or on transformers' Trainer, which fill some `auto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.draft import DEEPSPEED_AUTO, Draft, deepspeed_default
from zero_plugin.config.resolve.facts import PLACEMENT, Facts, MachineFacts, Resolved, StrategyName
from zero_plugin.config.resolve.optimizer import settle_optimizer, settle_scheduler
from zero_plugin.config.resolve.training import settle_batch, settle_clipping, settle_precision
from zero_plugin.config.resolve.zero import settle_engine, settle_zero
from zero_plugin.config.schema import deepspeed_schema
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, dotted, holds_auto, plain
from zero_plugin.config.validation import legal, show, validator, violations
from zero_plugin.errors import ConfigError, Problem

_RANDOM_LTD = ("data_efficiency", "data_routing", "random_ltd")


def resolve(document: Document, facts: Facts) -> Resolved:
    """Fill every open field of `document` from `facts`; the document stays as it is.

    What a user typed keeps its origin. Everything else carries the reason of the rule that found it. Before a run, when
    the facts are not `complete`, the fields that it may still fill stay open, in the result's `missing`.

    Raises:
        ConfigError: listing every field that cannot be filled, and every value that contradicts the loop, the machine
            or another value.
    """
    draft = Draft(document, facts)
    settle_precision(draft)  # each topic may look at the ones before it
    settle_zero(draft)
    settle_engine(draft)
    settle_batch(draft)
    settle_clipping(draft)
    settle_optimizer(draft)
    settle_scheduler(draft)
    _settle_rest(draft)
    _check_found(draft)
    return draft.finish()


def _settle_rest(draft: Draft) -> None:
    """Every other open field repeats a value that is settled, or takes DeepSpeed's default, listed as such."""
    same_elsewhere = {
        (*_RANDOM_LTD, "global_batch_size"): (draft.value("train_batch_size"), "train_batch_size"),
        (*_RANDOM_LTD, "micro_batch_size"): (draft.value("train_micro_batch_size_per_gpu"), "the micro batch"),
        ("data_parallel_size",): (draft.facts.machine.processes, "all processes of the run split the data"),
        ("sequence_parallel_size",): (1, "all processes of the run split the data"),
    }
    for path in draft.still_open():
        if path in DEEPSPEED_AUTO:
            continue
        default = deepspeed_default(path)
        value, reason = same_elsewhere.get(path, (None, ""))
        if value is not None:
            draft.put(path, value, reason)
        elif reason:
            draft.miss(path, f"value of {reason} yet", "Write a value.")
        elif default is None:
            draft.refuse(path, "auto, but there is no rule and no default for this key.", "Write a value.")
        else:
            draft.put(path, default[0], "no rule fills it", "default")


def _check_found(draft: Draft) -> None:
    """Hold what the rules took from the loop to the same schema as what was typed."""
    for found in violations(draft.tree, validator(deepspeed_schema())):
        entry = draft.tree.get(*found.path)
        if entry is None or entry.origin.typed_by_user:
            continue
        if found.kind == "unknown":
            message = f"{draft.value(found.path[0], 'type')} has no such parameter: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Drop the argument; it has {', '.join(found.wanted['properties'])}.")
        else:
            message = f"{show(found.value)} is not legal here: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Give {legal(found.wanted)}.")


def find_hopeless(
    document: Document, *, accelerator: Literal["cpu", "cuda", "xla"], processes: int, strategy: StrategyName
) -> tuple[Problem, ...]:
    """Problems that resolution will have whatever the script does: fp16 under DeepSpeed on a CPU, …

    Args:
        document: checked.
        accelerator: what the workers will run on; a GPU is taken to compute in bf16 and fp16 until a worker looks.
        processes: workers on all machines.
        strategy: what the document asks for.
    """
    try:
        resolve_before_run(document, accelerator=accelerator, processes=processes, strategy=strategy)
    except ConfigError as error:
        return error.problems
    return ()


def resolve_before_run(
    document: Document,
    *,
    accelerator: Literal["cpu", "cuda", "xla"],
    processes: int,
    strategy: StrategyName,
    bf16: bool = True,
) -> Resolved:
    """Resolve what can be without a loop and a model; what those tell stays open, in the result's `missing`.

    Args:
        document: checked.
        accelerator: what the workers will run on.
        processes: workers on all machines.
        strategy: what the document asks for.
        bf16: whether the device computes in bf16.

    Raises:
        ConfigError: what `find_hopeless` lists.
    """
    machine = MachineFacts(accelerator=accelerator, processes=processes, bf16=bf16, fp16=accelerator == "cuda")
    return resolve(document, Facts(machine=machine, strategy=strategy, complete=False))


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
    rows = []
    for path in _keys(deepspeed_schema()):
        default = deepspeed_default(path, kind)
        if path not in resolved.tree and path not in resolved.missing and default is not None:
            rows.append(Row(path, default[0], "unset", "", "nobody wrote the key"))
    return rows


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


_ZERO: Final = "zero_optimization"
_HALVES: Final = (("fp16", "enabled"), ("bf16", "enabled"))

# What the loop alone knows: absent, too, it is the script's. Accelerate takes an absent accumulation for 1, DeepSpeed
# an absent clipping for 1.0, and both would win over the script.
_THE_LOOPS: Final[tuple[KeyPath, ...]] = (
    ("train_batch_size",),
    ("train_micro_batch_size_per_gpu",),
    ("gradient_accumulation_steps",),
    ("gradient_clipping",),
)
# What Accelerate 1.15 fills in `prepare`, or transformers 5.23 from TrainingArguments; at another `auto` they stop.
_FILLED_BY_SCRIPTS: Final = frozenset(
    [
        *_THE_LOOPS,
        *_HALVES,
        *((_ZERO, key) for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")),
        (_ZERO, "stage3_param_persistence_threshold"),
        *(("optimizer", "params", name) for name in ("lr", "betas", "eps", "weight_decay")),
        *(("scheduler", "params", f"warmup_{name}") for name in ("min_lr", "max_lr", "num_steps")),
        ("scheduler", "params", "total_num_steps"),
    ]
)


def config_for_scripts(document: Document, resolved: Resolved) -> dict[str, Any] | None:
    """A DeepSpeed configuration in which `auto` is only where such a script fills it; None as long as the plan that
    would choose the stage, or where to offload, waits for the model.

    It is what the user wrote, with our value for every other `auto`, and with all that was found for ZeRO. What this
    package sets so that DeepSpeed's engine keeps our loop's contract is left out: such a script has another one.

    Args:
        document: what was configured, with ZeRO.
        resolved: the same, resolved as far as it can be before a run.
    """
    if any(path in resolved.missing for path in PLACEMENT):
        return None
    values: dict[KeyPath, Any] = dict.fromkeys(_THE_LOOPS, AUTO)
    for path, entry in document.deepspeed.entries.items():
        if path == ("gradient_clipping",) and entry.value is None:
            values[path] = 0.0  # null is "none" here, and 1.0 in DeepSpeed
        elif path in _THE_LOOPS and not entry.origin.typed_by_user:
            values[path] = AUTO  # a plan's, which the script does not know
        elif entry.value is not None:
            values[path] = _value(path, entry.value, resolved.tree)
    for path, entry in resolved.tree.entries.items():
        if path not in values and (path[0] == _ZERO or path[-1] == "torch_adam"):
            values[path] = _value(path, entry.value, resolved.tree)
    if resolved.zero_stage == 3:  # without it Accelerate and the Trainer cannot save a model
        values.setdefault((_ZERO, "stage3_gather_16bit_weights_on_model_save"), True)
    origin = Origin("rule", "for scripts")
    return Tree({path: Entry(value, origin) for path, value in values.items() if value is not None}).nested(auto="auto")


def _value(path: KeyPath, asked: Any, resolved: Tree) -> Any:
    """The value to write at `path`; None leaves the key to DeepSpeed."""
    if path in _FILLED_BY_SCRIPTS and (asked is AUTO or (path not in _HALVES and not holds_auto(asked))):
        return asked
    found = resolved.value(*path)
    if not holds_auto(found):
        return found
    if path in DEEPSPEED_AUTO:
        return None  # DeepSpeed's own word, and its default, at which Accelerate stops
    default = deepspeed_default(path, resolved.value("optimizer", "type"))
    return AUTO if default is None else default[0]
