"""Between a configuration and a plan: what its fields fix, and which open ones the plan fills, with what reason.

And the way back: a chosen setup as a new configuration, a launch YAML or a DeepSpeed JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.document import Document, yaml_text
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.resolve.facts import PLACEMENT, Facts, Resolved
from zero_plugin.config.resolve.resolve import MICRO_BATCH, resolve, unplanned_micro_batch
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, dotted
from zero_plugin.errors import ConfigError, MachineError, Problem
from zero_plugin.plan.model_source import ModelSource, open_model
from zero_plugin.plan.options import KEYS, Wanted
from zero_plugin.plan.search import Candidate, Change, Choice, plan, what_if
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, Setup, Workload, asked_optimizer, name_setup

Planned = Mapping[KeyPath, tuple[Any, str]]

# The share of memory that stays free, by how the activations are known.
TRACED: Final = 0.1
BY_FORMULA: Final = 0.2
UNKNOWN: Final = 0.35

_ZERO: Final = "zero_optimization"
_PINNED: Final = tuple((_ZERO, what, "pin_memory") for what in ("offload_optimizer", "offload_param"))
# What a plan chooses where it is open.
_CHOSEN: Final = ("stage", "offload_optimizer", "offload_param", "ratio", "sub_group_size", "micro_batch")
_SIZES: Final = (
    *("reduce_bucket", "allgather_bucket", "prefetch_bucket", "persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance"),
)


def open_fields(tree: Tree, facts: Facts) -> tuple[KeyPath, ...]:
    """The fields that only a plan can fill, as far as a training configuration leaves them open.

    The micro-batch is one of them where ZeRO trains and no loader tells it, now or, before a run, yet.

    Args:
        tree: the training configuration.
        facts: of the loop, and whether one may still come.
    """
    paths = (*PLACEMENT, KEYS["ratio"], *([MICRO_BATCH] if _plans_micro_batch(facts) else ()))
    return tuple(path for path in paths if tree.value(*path) is AUTO)


def nvme_folder(tree: Tree) -> Path | None:
    """Where a training configuration has NVMe offload keep its files."""
    folders = [tree.value(_ZERO, f"offload_{what}", "nvme_path") for what in ("optimizer", "param")]
    return next((Path(folder) for folder in folders if isinstance(folder, str)), None)


def fixed_fields(document: Document, resolved: Resolved, facts: Facts, *, sized: bool, margin: float) -> Wanted:
    """What the configuration fixes of a strategy.

    Args:
        document: what was asked for, with ZeRO.
        resolved: the same, resolved as far as it can be without a plan.
        facts: of the loop and the machine.
        sized: whether it is known what a sample takes; else a plan chooses no micro-batch.
        margin: see `Wanted`.
    """
    tree, asked = resolved.tree, document.deepspeed
    total = _number(asked.value("train_batch_size"))
    steps = _number(asked.value("gradient_accumulation_steps"))
    ratio = tree.value(*KEYS["ratio"], default=1.0)
    micro = facts.loop.micro_batch or _number(asked.value(*MICRO_BATCH))
    if micro is None and not (sized and _plans_micro_batch(facts)):
        micro, _ = unplanned_micro_batch(total, steps, facts.machine.processes)
    types = {"fp32": 4, "bf16": 2, "fp16": 2}
    unpinned = facts.machine.accelerator == "cpu" or any(asked.value(*path) is False for path in _PINNED)
    sub_group = KEYS["sub_group_size"]
    # Beside an open stage, device or ratio these two are a plan's, too; a micro-batch alone changes nothing else.
    is_placed = all(asked.value(*path) is not AUTO for path in (*PLACEMENT, KEYS["ratio"]))
    return Wanted(
        stage=_fixed(tree, KEYS["stage"], 0),
        ddp=False,
        precision=resolved.precision,
        gradient_bytes=types.get(str(tree.value("data_types", "grad_accum_dtype"))),
        offload_optimizer=_fixed(tree, KEYS["offload_optimizer"], "none"),
        offload_param=_fixed(tree, KEYS["offload_param"], "none"),
        ratio=None if ratio is AUTO else float(ratio),
        sub_group_size=_size(tree, sub_group) if is_placed else _number(asked.value(*sub_group)),
        micro_batch=micro,
        accumulation=steps or (None if total else 1),
        activation_checkpointing=False,  # the script's own is part of the model
        overlap_comm=asked.value(_ZERO, "overlap_comm") if asked.value(_ZERO, "overlap_comm") is not AUTO else None,
        param_buffer=_number(tree.value(*KEYS["param_buffer"])),  # no default: where it is open, the model tells
        pin_memory=False if unpinned else (True if is_placed else None),
        gradient_views=None,  # DDP's
        global_batch=total,
        margin=margin,
        **{name: _size(tree, KEYS[name]) for name in _SIZES},
    )


def planned_values(choice: Choice, wanted: Wanted, asked: Tree) -> dict[KeyPath, tuple[Any, str]]:
    """The value and the reason for every field that is open in `asked` and that the plan has chosen.

    Args:
        choice: something fits.
        wanted: what the plan was asked.
        asked: the training configuration.
    """
    assert choice.chosen is not None, "what fits nowhere fills nothing"
    setup, default = choice.chosen.setup, Setup().sub_group_size
    names = {name for name in _CHOSEN if asked.value(*KEYS[name]) is AUTO and name != "micro_batch"}
    if wanted.micro_batch is None:
        names.add("micro_batch")
    if setup.sub_group_size == default:
        names.discard("sub_group_size")  # the rule for it says so
    elif asked.value(*KEYS["sub_group_size"]) is None:
        names.add("sub_group_size")  # the plan counts on smaller ones than DeepSpeed's default
    if setup.offload_optimizer == "none":
        names.discard("ratio")
    found = {KEYS[name]: (getattr(setup, name), choice.reasons[name]) for name in _CHOSEN if name in names}
    if not setup.pin_memory and wanted.pin_memory is None:
        pinned = (path for path in _PINNED if asked.has_section(*path[:-1]))
        found |= dict.fromkeys(pinned, (False, choice.reasons["pin_memory"]))
    return found


def fits_nowhere(choice: Choice, changes: Sequence[Change], where: str) -> ConfigError:
    """The error of a plan by which nothing fits: the closest, what it is short of, and what would do.

    Args:
        choice: without a candidate that fits.
        changes: from `what_if`.
        where: what left the choice to the plan.
    """
    ways = "; ".join(_as_key(change.what) for change in changes[:3])
    fix = (
        f"Any of these would do: {ways}." if ways else "No single change would do; take a smaller model, or more GPUs."
    )
    return ConfigError([Problem(where, _ZERO, f"auto, but nothing fits: {choice.why_not}", fix)])


def _as_key(change: str) -> str:
    """A change of a `Wanted` field as what to write."""
    field, free, rest = change.partition(" free instead of ")
    if not free:
        return change
    if field == "activation_checkpointing":
        return "activation checkpointing (transformers: gradient_checkpointing_enable())"
    if field == "pin_memory":
        return f"{' and '.join(dotted(path) for path in _PINNED)}: auto instead of {rest}"
    return f"{dotted(KEYS[field])}: auto instead of {rest}"


def _plans_micro_batch(facts: Facts) -> bool:
    """Whether the micro-batch is left to a plan: what is not trained has none, and off DeepSpeed no number needs it."""
    trains = facts.optimizer is not None or not facts.complete
    return trains and facts.strategy == "deepspeed" and facts.loop.micro_batch is None


def _fixed(tree: Tree, path: KeyPath, default: Any) -> Any:
    """The settled value, None where it is open."""
    value = tree.value(*path, default=default)
    return None if value is AUTO else default if value is None else value


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(tree: Tree, path: KeyPath) -> int | None:
    """Elements as resolution has settled them, else DeepSpeed's default; None where the model will tell."""
    value = tree.value(*path)
    if value is AUTO:
        return None
    default = deepspeed_default(path)
    return _number(int(default[0]) if value is None and default is not None else value)


def fill_fields(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: ModelSizes,
    activations: Activations,
    cluster: Cluster,
    *,
    margin: float,
) -> Planned:
    """The values of the fields that only a plan can fill, with their reasons.

    Args:
        document: what was asked for, with ZeRO and a field open.
        resolved: the same, resolved as far as it can be without a plan.
        facts: of the loop and the machine; complete in a run.
        model: its sizes.
        activations: in the resolved precision.
        cluster: the machines.
        margin: see `Wanted`.

    Raises:
        ConfigError: nothing fits, or what is fixed excludes itself.
    """
    on_gpu = facts.machine.accelerator == "cuda"
    work = Workload(model, activations, asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu))
    sized = activations.saved.per_sample > 0
    wanted = fixed_fields(document, resolved, facts, sized=sized, margin=margin)
    choice = plan(work, cluster, wanted)
    if choice.chosen is None:
        first = open_fields(document.deepspeed, facts)[0]
        where = document.deepspeed.entries[first].origin.where
        raise fits_nowhere(choice, what_if(work, cluster, wanted).changes, where)
    return planned_values(choice, wanted, document.deepspeed)


def waits_for_plan(document: Document, facts: Facts) -> bool:
    """Whether a field is open that only a plan can fill."""
    asked = open_fields(document.deepspeed, facts)
    missing = resolve(document, replace(facts, complete=False)).missing if asked else ()
    return any(path in missing for path in asked)


def plan_before_run(
    document: Document, facts: Facts, source: ModelSource, sequence_length: int | None, cluster: Cluster
) -> Planned:
    """What a plan chooses for the fields that wait for it, the micro-batch among them where it is open.

    Args:
        document: what was asked for, with ZeRO.
        facts: of the machine, and whatever else is known of the run, not complete; where a GPU's memory is stated, the
            workers have GPUs.
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        cluster: the machines.

    Raises:
        ConfigError: there is no such model, nothing fits, or what is fixed excludes itself.
    """
    if launch_settings(document).gpu_memory is not None:
        facts = replace(facts, machine=replace(facts.machine, accelerator="cuda", fp16=True))
    resolved = resolve(document, replace(facts, complete=False))
    model, activations = open_model(source, sequence_length, resolved.precision)
    margin = TRACED if activations.source.startswith("traced") else BY_FORMULA
    return fill_fields(document, resolved, facts, model, activations, cluster, margin=margin)


def lay_plan(document: Document, planned: Planned) -> Document:
    """The document with what the plan has chosen in the place of what was open, each value with its reason."""
    chosen = {path: Entry(value, Origin("rule", "the plan", reason)) for path, (value, reason) in planned.items()}
    return replace(document, deepspeed=document.deepspeed.replace(chosen))


_OPTIMIZERS: Final = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
# The fields that each stage reads; the check warns about others.
_READ: Final[Mapping[int, tuple[str, ...]]] = {
    0: (),
    1: ("reduce_bucket", "allgather_bucket"),
    2: ("reduce_bucket", "allgather_bucket", "overlap_comm"),
    3: ("reduce_bucket", "overlap_comm", "prefetch_bucket", "persistence_threshold", "sub_group_size"),
}
_SUFFIXES: Final = (".yaml", ".yml", ".json")


def write_plan(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> None:
    """Write `config_text` as a new file.

    Raises:
        ConfigError: see `config_text`; or the file exists.
        MachineError: it cannot be written.
    """
    text = config_text(file, candidate, cluster, optimizer, nvme_path)
    if file.exists():
        raise ConfigError([Problem("--output", "", f"{file} exists", "Name a new file, or remove that one.")])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.\nName another file.") from None


def config_text(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> str:
    """The configuration in the language that the file's suffix says.

    Args:
        file: `.yaml`, `.yml` or `.json`.
        candidate: what to train like.
        cluster: on what.
        optimizer: DeepSpeed's name in lower case; one that it does not know is left to the script.
        nvme_path: folder for NVMe offload.

    Raises:
        ConfigError: another suffix; training without ZeRO, which a DeepSpeed JSON cannot say; NVMe without a folder.
    """
    setup = candidate.setup
    if file.suffix not in _SUFFIXES:
        raise _problem(f"{file} is neither YAML nor JSON", f"Name it {file.stem}.yaml or {file.stem}.json.")
    if "nvme" in (setup.offload_optimizer, setup.offload_param) and not nvme_path:
        raise ConfigError([Problem("--nvme_path", "", "is missing for a plan with NVMe", "Name the drive's folder.")])
    if file.suffix != ".json":
        head = f"# {name_setup(setup)}, as planned by `zero-plugin plan`.\n"
        head += f"#   zero-plugin launch --config_file {file.name} train.py\n"
        if setup.activation_checkpointing:
            head += "# The script switches activation checkpointing on: model.gradient_checkpointing_enable().\n"
        return head + yaml_text(launch_values(setup, cluster, optimizer, nvme_path))
    if setup.stage is None:
        raise _problem("a DeepSpeed JSON cannot say training without ZeRO", "Name a .yaml, or give --zero_stage auto.")
    return json.dumps(training_values(setup, cluster, optimizer, nvme_path), indent=2) + "\n"


def launch_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None = None) -> dict[str, Any]:
    """The keys of a launch config in Accelerate's layout, the training part under `deepspeed_config`."""
    kind = "DEEPSPEED" if setup.stage is not None else "MULTI_GPU" if cluster.processes > 1 else "NO"
    values: dict[str, Any] = {
        "distributed_type": kind,
        "num_processes": cluster.processes,
        **({"num_machines": cluster.nodes} if cluster.nodes > 1 else {}),
        "mixed_precision": setup.precision,
    }
    if setup.stage is None:
        return {**values, "deepspeed_config": {"gradient_accumulation_steps": setup.accumulation}}
    return {**values, "deepspeed_config": training_values(setup, cluster, optimizer, nvme_path)}


def training_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None = None) -> dict[str, Any]:
    """The same as a DeepSpeed configuration; what depends on the loop says `auto`."""
    values: dict[str, Any] = {
        "train_batch_size": setup.micro_batch * setup.accumulation * cluster.processes,
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "gradient_clipping": "auto",
    }
    if setup.precision != "no":
        values[setup.precision] = {"enabled": True}
    if optimizer in _OPTIMIZERS:
        values["optimizer"] = {"type": _OPTIMIZERS[optimizer], "params": {"lr": "auto", "weight_decay": "auto"}}
    return {**values, "zero_optimization": _zero(setup, nvme_path)}


def _zero(setup: Setup, nvme_path: str | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.stage}
    zero |= {KEYS[name][-1]: getattr(setup, name) for name in _READ[setup.stage or 0]}
    if setup.stage in (1, 2):
        zero["allgather_bucket_size"] += setup.allgather_bucket % 2  # DeepSpeed takes no odd one
    if setup.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for what, device in (("optimizer", setup.offload_optimizer), ("param", setup.offload_param)):
        if device != "none":
            path = {"nvme_path": nvme_path} if device == "nvme" else {}
            share = {"ratio": setup.ratio} if what == "optimizer" and setup.ratio != 1.0 else {}
            zero[f"offload_{what}"] = {"device": device, **path, "pin_memory": setup.pin_memory, **share}
    return zero


def _problem(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("--output", "", message, fix)])
