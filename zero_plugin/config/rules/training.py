"""The view of a document that all rules use, and the rules of training: batch, optimizer, scheduler, precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.keys import ACCUMULATION, CLIPPING, GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, TRAINING
from zero_plugin.config.keys import STAGE as ZERO_STAGE
from zero_plugin.config.schema import key_schema
from zero_plugin.config.tree import AUTO, Entry, Tree, show
from zero_plugin.errors import Problem, Severity

STAGE: Final = ZERO_STAGE.name
_FIELDS: Final = {key.name: key.field for key in TRAINING if key.field}  # also the names of the flags


@dataclass(frozen=True, slots=True)
class Asked:
    """A document's requests. An open field (`auto`) equals no value, so it contradicts nothing."""

    document: Document

    def entry(self, key: str) -> Entry | None:
        """Return the leaf at the dotted `key` of the training configuration, or of the launch keys."""
        path = key.split(".")
        return self.document.deepspeed.get(*path) or self.launch.get(*path)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value at the dotted `key`; AUTO for an open one."""
        entry = self.entry(key)
        return default if entry is None else entry.value

    def is_on(self, key: str) -> bool:
        """Return whether the key exists and is true."""
        return self.value(key) is True

    def has(self, section: str) -> bool:
        """Return whether anything is written at or below the dotted key."""
        return self.document.deepspeed.has_section(*section.split("."))

    def below(self, section: str) -> list[str]:
        """Return the dotted keys of everything that is written below the dotted key."""
        return [f"{section}.{'.'.join(path)}" for path in self.document.deepspeed.section(*section.split("."))]

    def says_something(self, key: str) -> bool:
        """Return whether a user wrote a value that is not open, empty, or the default."""
        entry = self.entry(key)
        if entry is None or not entry.origin.typed_by_user or entry.value is AUTO:
            return False
        wanted = key_schema(tuple(key.split("."))) or {}
        return entry.value not in (None, "", "none", (), {}) and entry.value != wanted.get("default", AUTO)

    def written(self, key: str) -> str:
        """Return the place of a key, or of the first key of a section."""
        entry = self.entry(key)
        return self.document.place(("deepspeed", *key.split("."))) if entry is None else entry.origin.where

    # ---- facts for nearly every rule --------------------------------------------------------------------------------

    @property
    def launch(self) -> Tree:
        """The launch keys."""
        return self.document.launch

    @property
    def on_cpu(self) -> str:
        """The place of `use_cpu: true`; "" if it is not true."""
        return self.written("use_cpu") if self.is_on("use_cpu") else ""

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, 0 if none is written; None if it is open or illegal."""
        stage = self.value(STAGE, default=0)
        return stage if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage <= 3 else None

    @property
    def stage_said(self) -> str:
        """The stage and its place, for a message."""
        entry = self.entry(STAGE)
        if entry is not None and entry.origin.kind == "rule":
            return f"the stage is {self.stage}, which the plan has chosen"
        typed = entry is not None and entry.origin.typed_by_user
        return f"the stage is {self.stage} " + (f"at {self.written(STAGE)}" if typed else "where none is written")

    @property
    def precision(self) -> str | None:
        """`fp16`, `bf16` or `no` if the document decides it; None if the run decides."""
        asked = self.value("mixed_precision")
        on = [kind for kind in ("fp16", "bf16") if self.is_on(f"{kind}.enabled")]
        if on:
            return on[0]
        if asked in ("no", "fp16", "bf16"):
            return str(asked)
        off = all(self.value(f"{kind}.enabled") is False for kind in ("fp16", "bf16"))
        return "no" if off else None

    def offload(self, what: str) -> Any:
        """Return the offload device of `optimizer` or `param`: `none`, `cpu`, `nvme`; AUTO if it is open."""
        return self.value(f"zero_optimization.offload_{what}.device", default="none")

    @property
    def optimizer(self) -> str:
        """The optimizer section's type in lower case; "" without a section."""
        kind = self.value("optimizer.type")
        return kind.lower() if isinstance(kind, str) else ""

    # ---- findings -------------------------------------------------------------------------------------------------

    def error(self, key: str, message: str, fix: str) -> Problem:
        """Return an error: the run would not start, or not train as written."""
        return self._finding(key, message, fix, "error")

    def warning(self, key: str, message: str, fix: str) -> Problem:
        """Return a warning: the key has no effect, or one that the user may not expect."""
        return self._finding(key, message, fix, "warning")

    def no_effect(self, key: str, why: str, fix: str = "Delete it.") -> Problem:
        """Return a warning that says why the key has no effect."""
        return self._finding(key, f"has no effect: {why}", fix, "warning")

    def idle(self, keys: Iterable[str], why: str, fix: str = "Delete it.") -> Iterator[Problem]:
        """Yield a warning, as `no_effect`, for each key or section with a value other than the default."""
        for key in keys:
            if any(map(self.says_something, (key, *self.below(key)))):
                yield self.no_effect(key, why, fix)

    def note(self, key: str, message: str) -> Problem:
        """Return a note: information for the user."""
        return self._finding(key, message, "", "note")

    def how_to_set(self, key: str, value: str, *causes: str) -> str:
        """Return the fix that sets `key`, at its place or under its name in this document.

        If the key or one of `causes` came from a flag, the fix is the flag to give.
        """
        entry = self.entry(key)
        entries = [entry, *(self.entry(cause) for cause in causes)]
        if key in _FIELDS and any(one is not None and one.origin.kind == "flag" for one in entries):
            return f"Give --{_FIELDS[key]} {value}"
        if entry is not None and entry.origin.typed_by_user:
            return f"Write {value} at {entry.origin.where}"
        return f"Write {self.name(key)}: {value}"

    def name(self, key: str) -> str:
        """Return the key's name in this document: in a launch config its short field, if it has one.

        A DeepSpeed JSON with only launch flags is no launch config.
        """
        kinds = {entry.origin.kind for entry in self.launch.entries.values()}
        is_json = not kinds & {"file", "code"} and any(
            entry.origin.kind == "file" for entry in self.document.deepspeed.entries.values()
        )
        return _FIELDS.get(key, key) if kinds and not is_json else key

    def _finding(self, key: str, message: str, fix: str, severity: Severity) -> Problem:
        path, value = tuple(key.split(".")), self.value(key)
        name = (self.document.deepspeed if path in self.document.deepspeed else self.launch).typed(*path)
        return Problem(self.written(key), name, message, fix, "" if value is None else show(value), severity)


def needs_gpu(asked: Asked, key: str, fix: str = "Keep one of the two.") -> Iterator[Problem]:
    """Yield an error if a true key meets `use_cpu: true`. Without `use_cpu`, the run itself checks for a GPU."""
    if asked.on_cpu:
        yield asked.error(key, f"true needs a GPU, but use_cpu is true at {asked.on_cpu}", fix)


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value: Any) -> bool:
    """Return whether `value` is a number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_batch(asked: Asked) -> Iterator[Problem]:
    """Compare the global batch size with the product of its known factors."""
    total = asked.value(GLOBAL_BATCH.name)
    processes, shared = asked.value("num_processes"), asked.value(SEQUENCE.name, default=1)
    of_processes = "num_processes"
    if is_count(processes) and is_count(shared) and shared > 1 and processes % shared == 0:
        of_processes, processes = f"groups (num_processes ÷ {SEQUENCE.name})", processes // shared
    parts = {
        **{key.name: asked.value(key.name) for key in (MICRO_BATCH, ACCUMULATION)},
        of_processes: processes,
    }
    known = {name: n for name, n in parts.items() if is_count(n)}
    if not is_count(total) or not known:
        return
    product = math.prod(known.values())
    factors = " × ".join(f"{name} {n}" for name, n in known.items())
    arithmetic = f"{factors} = {product}" if len(known) > 1 else factors
    if len(known) == len(parts) and total != product:
        fix = f"Write {product}, or auto, or delete it: it follows from the others."
        yield asked.error(GLOBAL_BATCH.name, f"{total}, but {arithmetic}", fix)
    elif total % product:
        fix = f"Write a multiple of {product}, e.g. {max(1, round(total / product)) * product}."
        yield asked.error(GLOBAL_BATCH.name, f"{total} is not a multiple of {arithmetic}", fix)


_PARAMS: Final = "optimizer.params"
_TESTED_WITH_ZERO: Final = ("adam", "adamw", "adagrad", "lion", "muon")
_OF_WHOLE_TENSORS: Final = {
    "lamb": "scales each tensor's update by its norm",
    "adafactor": "factors each tensor's second moment",
}
_NEVER: Final = {
    "lbfgs": "computes the loss itself, several times a step, and gradients come from accelerator.backward",
    "sparseadam": "only steps sparse gradients, and models that have them are refused under DeepSpeed",
}


def _optimizer(asked: Asked) -> Iterator[Problem]:
    kind, name = asked.optimizer, asked.value("optimizer.type")
    if kind in _OF_WHOLE_TENSORS and asked.stage and not asked.is_on("zero_allow_untested_optimizer"):
        message = f"{name} {_OF_WHOLE_TENSORS[kind]}, and ZeRO updates flat pieces of them; {asked.stage_said}"
        fix = "Write AdamW, or stage 0. To use it all the same, write zero_allow_untested_optimizer: true."
        yield asked.error("optimizer.type", f"{message}. The weights would not be those of stage 0", fix)
    if kind in _NEVER:
        yield asked.error("optimizer.type", f"{name} {_NEVER[kind]}", "Write another, such as AdamW.")
    if kind == "lamb" and asked.on_cpu:
        message = f"{name} needs a GPU, but use_cpu is true at {asked.on_cpu}"
        yield asked.error("optimizer.type", message, "Write AdamW, or train on a GPU.")
    graphs = f"{_PARAMS}.capturable"
    if asked.is_on(graphs) and asked.on_cpu and asked.offload("optimizer") == "none":
        message = f"true is for CUDA graphs, which need a GPU, but use_cpu is true at {asked.on_cpu}"
        yield asked.error(graphs, message, "Delete capturable, or train on a GPU.")
    states = f"{_PARAMS}.fp32_optimizer_states"
    in_halves = any(asked.is_on(f"{kind}.{kind}_master_weights_and_grads") for kind in ("bf16", "fp16"))
    if asked.value(states) is False and not in_halves:
        yield asked.no_effect(states, "the weights that the optimizer steps are in fp32, and so are its states")
    scale = asked.value("fp16.loss_scale")
    if kind == "lamb" and is_number(scale) and scale != 0:
        message = f"{scale}, but DeepSpeed's Lamb needs a dynamic loss scale"
        yield asked.error("fp16.loss_scale", message, "Write 0, or another optimizer.type.")
    if kind == "muon" and asked.stage == 3:
        if asked.value("zero_optimization.reduce_scatter", default=True) is True:
            message = f"{name} at ZeRO stage 3 needs zero_optimization.reduce_scatter: false, and it is true"
            yield asked.error("optimizer.type", message, "Write that, or stage 1 or 2.")
        if asked.is_on("zero_optimization.zero_quantized_gradients"):
            message = f"true, but {name} at ZeRO stage 3 does not reduce gradients that way"
            yield asked.error("zero_optimization.zero_quantized_gradients", message, "Delete it.")
    clipping = asked.value(CLIPPING.name)
    if kind == "muon" and asked.stage and is_number(clipping) and clipping > 0:
        message = (
            f"{clipping}, but {asked.stage_said}, where DeepSpeed clips the updates of {name}, not the gradients: the "
            "norm, not lr, then decides the length of a step"
        )
        yield asked.warning(CLIPPING.name, message, "Delete it, or write stage 0, where gradients are clipped.")
    if kind == "muon" and asked.is_on(f"{_PARAMS}.foreach") and not asked.is_on(f"{_PARAMS}.torch_adam"):
        yield asked.no_effect(f"{_PARAMS}.foreach", "DeepSpeed's Muon hands it to torch's Adam, with torch_adam: true")
    if kind == "adagrad" and asked.is_on(f"{_PARAMS}.amsgrad") and asked.offload("optimizer") in ("cpu", "nvme"):
        yield asked.no_effect(f"{_PARAMS}.amsgrad", "DeepSpeed's Adagrad on the CPU takes it and never reads it")
    if asked.is_on("optimizer.legacy_fusion") and (asked.stage or asked.precision in ("no", "bf16")):
        yield asked.no_effect("optimizer.legacy_fusion", "only fp16 at stage 0 reads it")
    untested = kind not in ("", *_NEVER, *_TESTED_WITH_ZERO, *_OF_WHOLE_TENSORS)
    if untested and asked.value("zero_allow_untested_optimizer") is False and asked.stage:
        message = f"false, but DeepSpeed has not tried {name} with ZeRO and refuses it then"
        fix = "Delete it: this package itself checks that an optimizer works on flat pieces."
        yield asked.error("zero_allow_untested_optimizer", message, fix)
    if kind == "adamw" and asked.value(f"{_PARAMS}.adam_w_mode") is False:
        where = asked.written("optimizer.type")
        message = f"false, but the type is AdamW at {where}, which decays weights as AdamW does"
        yield asked.error(f"{_PARAMS}.adam_w_mode", message, "Write type: Adam for L2 decay, or delete it.")


def _schedule(asked: Asked) -> Iterator[Problem]:
    path = "scheduler.params.warmup_num_steps"
    warmup, total = asked.value(path), asked.value("scheduler.params.total_num_steps")
    if is_count(warmup) and is_count(total) and warmup > total:
        message = f"{warmup} steps of warm-up are more than the total_num_steps of {total}"
        yield asked.error(path, message, f"Write at most {total}, or raise total_num_steps.")
    for key in ("scheduler.params.last_epoch", "scheduler.params.last_batch_iteration"):
        if is_number(begun := asked.value(key)) and begun != -1:
            yield asked.error(key, f"{begun}, but load_state() resumes a scheduler, in its own step", "Delete it.")
    mode = "scheduler.params.scale_mode"
    if asked.value(mode) not in (None, "cycle") and asked.value("scheduler.params.scale_fn") is None:
        yield asked.no_effect(mode, "only scale_fn reads it, a function, which no file can hold")
    top, rate = "scheduler.params.warmup_max_lr", f"{_PARAMS}.lr"
    if is_number(asked.value(top)) and is_number(asked.value(rate)) and asked.value(top) != asked.value(rate):
        why = f"the schedule sets the learning rate, up to warmup_max_lr {asked.value(top)} at {asked.written(top)}"
        yield asked.no_effect(rate, why, f"Write {asked.value(top)}, or auto for warmup_max_lr.")


# Rules for optimizers that ZeRO or offload cannot run, for Adam's two spellings, and for schedulers.
OPTIMIZING: Final = (_optimizer, _schedule)


_CASTS_ALL_THE_SAME: Final = "true, but fp16 is off, and DeepSpeed rounds the model's inputs to fp16 all the same"

_DYNAMIC_SCALING: Final = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_OF_SECTION: Final = {"fp16": ("loss_scale", *_DYNAMIC_SCALING), "bf16": ("immediate_grad_update",)}
# Casts of DeepSpeed's engine that an fp32 model does not go through.
_OF_HALVES: Final = ("data_types.buffer_dtype", "data_types.keep_in_fp32_modules")
_MASTERS: Final = {"fp16": "fp16.fp16_master_weights_and_grads", "bf16": "bf16.bf16_master_weights_and_grads"}
_STATES: Final = "bf16.bf16_optimizer_states"


def check_one_precision(asked: Asked) -> Iterator[Problem]:
    """Yield an error if `mixed_precision`, `fp16.enabled` and `bf16.enabled` contradict each other."""
    if asked.is_on("fp16.enabled") and asked.is_on("bf16.enabled"):
        message = f"true, and fp16.enabled is true at {asked.written('fp16.enabled')}"
        yield asked.error("bf16.enabled", message, "Enable one of them.")
    chosen = asked.entry("mixed_precision")
    if chosen is None or chosen.value not in ("no", "fp16", "bf16"):
        return
    for kind in ("fp16", "bf16"):
        entry = asked.entry(f"{kind}.enabled")
        if entry is None or not isinstance(entry.value, bool):
            continue
        if entry.origin.kind == "file" and chosen.origin.kind == "flag":
            continue  # a flag overrides the file
        if entry.value != (chosen.value == kind):
            message = f"{show(entry.value)}, but mixed_precision is {chosen.value} at {chosen.origin.where}"
            fix = f'Write "auto" here, or {show(not entry.value)}.'
            yield asked.error(f"{kind}.enabled", message, fix)


def _of_the_other(asked: Asked) -> Iterator[Problem]:
    for kind, keys in _OF_SECTION.items():
        if asked.precision not in (None, kind):
            yield from asked.idle([f"{kind}.{key}" for key in keys], f"{kind} is off")
    # In fp32, runs on one device and DDP read it too. If the type is absent, a ZeRO section selects DeepSpeed.
    runs = asked.value("distributed_type", default="DEEPSPEED" if asked.has("zero_optimization") else "")
    if asked.precision == "fp16" or (asked.precision == "no" and runs == "DEEPSPEED"):
        yield from asked.idle(["bf16.check_grad_overflow"], "bf16 is off")
    if asked.precision == "no":
        yield from asked.idle(_OF_HALVES, "the model is in fp32, and DeepSpeed casts nothing of it")
    if asked.is_on("fp16.auto_cast") and asked.precision in ("no", "bf16"):
        yield asked.error("fp16.auto_cast", _CASTS_ALL_THE_SAME, "Delete it, or write fp16.enabled: true.")
    key = "bf16.immediate_grad_update"
    if asked.precision not in (None, "bf16") or asked.stage is None or not asked.says_something(key):
        return
    offload, sums = asked.offload("optimizer"), asked.value("data_types.grad_accum_dtype")
    if asked.stage != 1:
        yield asked.no_effect(key, f"only stage 1 reads it, and {asked.stage_said}")
    elif offload in ("cpu", "nvme"):
        yield asked.no_effect(key, f"only an optimizer on the device reads it, and it is offloaded to {offload}")
    elif sums in ("bf16", "fp16"):
        where = asked.written("data_types.grad_accum_dtype")
        yield asked.no_effect(key, f"only sums of gradients in fp32 read it, and grad_accum_dtype is {sums} at {where}")


def _loss_scale(asked: Asked) -> Iterator[Problem]:
    if asked.precision not in (None, "fp16"):
        return
    scale = asked.value("fp16.loss_scale", default=0)
    if not is_number(scale):
        return
    if scale:
        why = f"fp16.loss_scale is a fixed {show(scale)} at {asked.written('fp16.loss_scale')}"
        fix = "Delete it, or write fp16.loss_scale: 0 for a dynamic scale."
        yield from asked.idle([f"fp16.{key}" for key in _DYNAMIC_SCALING], why, fix)
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        if asked.precision == "fp16" and asked.value(f"fp16.{key}") == 0:
            message = "0, which DeepSpeed refuses while the loss scale is dynamic (fp16.loss_scale 0)"
            yield asked.error(f"fp16.{key}", message, "Write a number above 0.")


def _master_weights(asked: Asked) -> Iterator[Problem]:
    on = {kind: key for kind, key in _MASTERS.items() if asked.is_on(key)}
    if len(on) == 2:
        message = f"true, and {_MASTERS['fp16']} is true at {asked.written(_MASTERS['fp16'])}"
        yield asked.error(_MASTERS["bf16"], message, "Keep the one whose precision is on.")
    if asked.is_on(_STATES) and not asked.is_on(_MASTERS["bf16"]):
        message = "true, but it needs bf16.bf16_master_weights_and_grads: true"
        yield asked.error(_STATES, message, "Write that too.")
    for kind, key in on.items():
        if asked.precision not in (None, kind):
            message = f"true, but {kind} is off: {kind} master weights belong to a {kind} model"
            yield asked.error(key, message, f"Delete it, or write {kind}.enabled: true.")
        if asked.stage == 0:
            message = f"true needs ZeRO stage 1, 2 or 3, but {asked.stage_said}"
            yield asked.error(key, message, "Delete it, or choose one of these stages.")
        yield from _cpu_adam(asked, key, needed=not (kind == "bf16" and asked.is_on(_STATES)))


def _cpu_adam(asked: Asked, key: str, *, needed: bool) -> Iterator[Problem]:
    """Check the optimizer for 16-bit master weights: DeepSpeed's CPU Adam, unless its states are bf16 on the GPU."""
    device = asked.offload("optimizer")
    if device == "none" and needed and asked.stage:
        message = "true needs the optimizer offloaded, because only DeepSpeed's CPU Adam steps 16-bit master weights"
        device_key = asked.name("zero_optimization.offload_optimizer.device")
        yield asked.error(key, message, f"Write {device_key}: cpu, or delete it.")
    if device in ("cpu", "nvme") and (asked.is_on(f"{_PARAMS}.torch_adam") or asked.optimizer not in _ADAMS):
        culprit = f"{_PARAMS}.torch_adam" if asked.is_on(f"{_PARAMS}.torch_adam") else "optimizer.type"
        message = f"{show(asked.value(culprit))}, but {key} at {asked.written(key)} needs DeepSpeed's CPU Adam"
        yield asked.error(culprit, message, f"Write type: AdamW or Adam without torch_adam, or delete {key}.")


_ADAMS: Final = ("", "adam", "adamw")


def _data_types(asked: Asked) -> Iterator[Problem]:
    modules = "torch_autocast.lower_precision_safe_modules"
    if asked.stage == 0 and asked.is_on("torch_autocast.enabled"):
        yield from asked.idle([modules], f"only stages 1, 2 and 3 read it, and {asked.stage_said}")
    if asked.is_on("torch_autocast.enabled") and asked.is_on("zero_optimization.zero_quantized_weights"):
        message = f"true and torch_autocast.enabled: true at {asked.written('torch_autocast.enabled')}"
        yield asked.error("zero_optimization.zero_quantized_weights", message, "Keep one of the two.")
    if asked.precision is None:
        return
    model = {"no": "fp32"}.get(asked.precision, asked.precision)
    params, sums = (asked.value(f"data_types.{name}") for name in ("param_dtype", "grad_accum_dtype"))
    if params in ("fp32", "fp16", "bf16") and params != model:
        message = f"{params}, but the model is in {model}: precision is {asked.precision}"
        yield asked.error("data_types.param_dtype", message, f"Delete it: it follows from the precision ({model}).")
    if asked.stage == 0 and sums in ("fp32", "fp16", "bf16") and sums != model:
        message = f"{sums} with a model in {model} needs ZeRO, but {asked.stage_said}"
        yield asked.error("data_types.grad_accum_dtype", message, f"Write {model}, or choose a stage from 1 to 3.")
    if asked.stage == 2 and sums in ("fp16", "bf16") and sums != model:
        message = f"{sums} with a model in {model}, but stage 2 sums gradients in fp32 or in the model's type"
        yield asked.error("data_types.grad_accum_dtype", message, f"Write {model}, or choose stage 1 or 3.")


# Rules for fp16, bf16 and `mixed_precision`, loss scaling, 16-bit master weights, dtypes.
PRECISION: Final = (check_one_precision, _of_the_other, _loss_scale, _master_weights, _data_types)
