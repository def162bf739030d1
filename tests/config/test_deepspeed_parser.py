"""Thousands of documents, read by the package and by DeepSpeed's own parser: documents that only one accepts."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import pytest

from zero_plugin.config.check import find_problems
from zero_plugin.config.document import Document
from zero_plugin.config.keys import PLACEMENT
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, MachineFacts, ModelFacts, OptimizerFacts, SchedulerFacts
from zero_plugin.config.resolve.resolve import config_for_scripts, resolve, resolve_before_run
from zero_plugin.config.tree import AUTO, holds_auto
from zero_plugin.errors import ConfigError, Problem

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_documents import TRIES, Config, documents, parse, without, without_auto

pytestmark = pytest.mark.timeout(1800)

Device = Literal["cpu", "cuda"]
_ZERO: Final = "zero_optimization"
WHERE: Final = "Accelerator(config=…)"

# Sections that DeepSpeed reads by models, which check every key and value. It reads the others by hand.
_BY_MODELS: Final = (
    "zero_optimization|fp16|bf16|tensorboard|wandb|csv_monitor|comet|comms_logger|timers|compile|hybrid_engine|"
    "weight_quantization|tensor_parallel(?!.partition_config|.tp.mpu|.tp.tp_group)"
)
# Why the package refuses values to which DeepSpeed's parser gives a meaning: `key: message` of these errors.
ON_PURPOSE: Final[Mapping[str, tuple[str, ...]]] = {
    "the parser keeps it without a look; what reads it later fails, or takes any text for true": (
        rf"(?!({_BY_MODELS})\b).* is not legal here",
        r"(optimizer|scheduler|pipeline|datastates_ckpt|data_efficiency)\..*: unknown key",
        r"tensor_parallel.partition_config\..*: unknown key",
        r"comet\..* is no (key|mode) of Comet's",
    ),
    "true as a number, digits in groups, and a scale below zero of fp16 that is off or fixed are slips": (
        rf"({_BY_MODELS})\b\S*: (true|false|\"\d+_\d+\") is not legal here",
        r"fp16.(min_loss_scale|loss_scale_window): \"?-.* is not legal here",
    ),
    "the engine refuses it or fails on it, when it is built or at its first step": (
        r"zero_optimization.legacy_stage1: .* is not legal here",
        r"zero_optimization.offload_\w+.device: nvme without a path",
        r"zero_optimization.offload_optimizer.ratio: .* only DeepSpeed's own Adam steps on CPU and GPU",
        r"zero_optimization.allgather_bucket_size: \d+ is odd",
        r"zero_optimization.compute_grad_norm: false (does not go with|but gradient_clipping is)",
        r"zero_optimization.zero_quantized_\w+: true( needs reduce_scatter|, but Muon| beside torch_autocast)",
        r"(gradient_predivide_factor|prescale_gradients): .* while ZeRO reduces by reduce_scatter",
        r"optimizer.type: (Muon at ZeRO stage 3 needs|SparseAdam|LBFGS)",
        r"optimizer.type: .* needs DeepSpeed's CPU Adam",
        r"(bf16|fp16).\w+_master_weights_and_grads: true(,| needs)",
        r"fp16.loss_scale: .* DeepSpeed's Lamb needs a dynamic loss scale",
        r"optimizer.params.max_grad_norm: DeepSpeed refuses it here",
        r"data_types.grad_accum_dtype: .* (needs ZeRO|but stage 2)",
        r"activation_checkpointing.contiguous_memory_optimization: true needs",
        r"data_efficiency.data_routing.random_ltd.\S*enabled: true(,| without) ",
    ),
    "DeepSpeed drops it without a word, or trains otherwise than written": (
        r"zero_optimization.\S*: (cpu|nvme|true|[\d.]+) needs ZeRO stage",
        r"zero_optimization.offload_optimizer.super_offload: true, but",
        r"zero_optimization.cpu_offload_use_pin_memory: DeepSpeed drops its value",
        r"\S*: \S* is written too",
        r"optimizer.type: (Lamb|Adafactor) .* The weights would not be those of stage 0",
        r"optimizer.params.adam_w_mode: false, but the type is AdamW",
        r"data_types.param_dtype: .* but the model is in",
        r"fp16.auto_cast: true, but fp16 is off",
        r"scheduler.params.warmup_num_steps: .* more than the total_num_steps",
    ),
    "the loop decides it, or load_state(), or there is only data parallelism": (
        r"(managed_gradient_accumulation|compile.deepcompile|autotuning.enabled): true",
        r"(zero_optimization.zenflow: is|expert_parallel.enabled: true is) not supported",
        r"(tensor_parallel|pipeline|sequence_parallel_size)\S*: \d+ is not supported",
        r"scheduler.params.last_\w+: .* load_state\(\) resumes",
    ),
}


class Parser:
    """DeepSpeed's parser, which asks the accelerator for its name."""

    device: Device = "cpu"

    def read(self, config: Config, device: Device = "cuda") -> tuple[Config | None, str]:
        """Return the parsed configuration, or None and the parser's error."""
        self.device = device
        try:
            return parse(config), ""
        except Exception as error:  # noqa: BLE001 - it refuses by errors of many kinds
            return None, f"{type(error).__name__}: {error}"


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parser]:
    """Return a parser that assumes a world of one process, and is silent."""
    from deepspeed.runtime.swap_tensor import aio_config
    from deepspeed.utils import logger

    parser = Parser()
    monkeypatch.setattr(aio_config, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: parser.device))
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield parser
    logger.setLevel(level)


def checked(config: Config) -> tuple[Document | None, list[Problem]]:
    """Return the document, or None if unreadable, and all findings."""
    before = copy.deepcopy(config)
    try:
        document = document_from_mapping(config, WHERE)
        return document, find_problems(document)
    except ConfigError as error:
        return None, list(error.problems)
    finally:
        assert config == before


def errors(problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def given_to_deepspeed(document: Document, device: Device, stage: int = 2) -> Config | None:
    """Return the config that a run with all placeholders passes to DeepSpeed, with this stage if open.

    Return None if the run refuses the document by name.
    """
    plan = dict.fromkeys(PLACEMENT, "none") | {(_ZERO, "stage"): stage}
    is_open = [path for path in PLACEMENT if document.deepspeed.value(*path) is AUTO]
    facts = Facts(
        machine=MachineFacts(device, 1, bf16=True, fp16=device == "cuda"),
        model=ModelFacts(64, "the model", 1_000, 10_000),
        optimizer=OptimizerFacts(given={"lr": 1e-3}, placeholder=True),
        scheduler=SchedulerFacts(True, 100, 10),
        strategy="deepspeed",
        planned={path: (plan[path], "it fits") for path in is_open},
    )
    try:
        return resolve(document, facts).deepspeed_config()
    except ConfigError:
        return None


def config_of_a_script(document: Document) -> Config:
    """Return the config that `launch` gives to a script of another layer."""
    resolved = resolve_before_run(document, accelerator="cuda", processes=1, strategy="deepspeed")
    return config_for_scripts(document, resolved) or {}


def with_a_batch(config: Config) -> Config:
    """Return the config without open keys, and with the batch size that the parser requires."""
    read: Config = without_auto(config)
    if all(read.get(key) is None for key in ("train_batch_size", "train_micro_batch_size_per_gpu")):
        read["train_micro_batch_size_per_gpu"] = 1
    return read


def how_it_was_written(config: Config, document: Document, parser: Parser) -> str:
    """Return the parser's error for an accepted document as written, before the package reads or fills it."""
    if not parser.read(with_a_batch(config))[1]:
        return "and DeepSpeed reads it as it is written"
    tree = document.deepspeed
    if not parser.read(with_a_batch(tree.nested(auto="auto")))[1]:
        return "and DeepSpeed reads it in the spelling that the package reads it as"
    if any(entry.value is None or holds_auto(entry.value) for entry in tree.entries.values()):
        return "and DeepSpeed cannot, with an open field that a run fills, or a null that it leaves out"
    several = tree.value("train_batch_size") is not None
    return "and DeepSpeed can, on several processes" if several else "of no meaning as it is written"


def reason(problem: Problem) -> str:
    """Return why the table excuses an error, or ""."""
    said = f"{problem.key}: {problem.message}"
    return next((why for why, patterns in ON_PURPOSE.items() if any(re.match(one, said) for one in patterns)), "")


@pytest.mark.parametrize("tries", TRIES)
def test_what_is_accepted_is_read_by_deepspeed(tries: int, parser: Parser) -> None:
    """The configuration of a run, on a CPU and on a GPU, passes the parser of its engine."""
    counts: Counter[str] = Counter()
    faults = []
    for number, config in enumerate(documents(tries)):
        document, problems = checked(config)
        if document is None or errors(problems):
            counts["refused by check"] += 1
            continue
        counts["accepted by check"] += 1
        counts[f"accepted, {how_it_was_written(config, document, parser)}"] += 1
        for device in ("cpu", "cuda"):
            given = given_to_deepspeed(document, device, stage=1 + number % 3)
            against = "" if given is None else parser.read(given, device)[1]
            outcome = "refused by the run" if given is None else "refused by DeepSpeed" if against else "read by both"
            counts[f"on {device}: {outcome}"] += 1
            faults += [f"{device}: {against}: {config}"] if against else []
    print("\n".join(f"{count:5} {what}" for what, count in counts.most_common()))
    assert not faults, "\n".join(faults)
    assert counts["on cpu: read by both"] > tries / 10 < counts["on cuda: read by both"]
    assert counts["accepted, of no meaning as it is written"] == 0


@pytest.mark.parametrize("tries", TRIES)
def test_what_is_refused_means_nothing_to_deepspeed(tries: int, parser: Parser) -> None:
    """If the parser takes a document that the package refuses, each faulty key is in the table or ignored there."""
    counts: Counter[str] = Counter()
    faults = []
    for config in documents(tries):
        found = errors(checked(config)[1])
        written = with_a_batch(config)
        read, _ = parser.read(written)
        if not found or read is None:
            counts["accepted" if not found else "refused by both"] += 1
            continue
        counts["refused by the package alone"] += 1
        for problem in found:
            assert problem.where, problem
            assert problem.fix.endswith((".", "?")), problem
            without_it, _ = parser.read(without(written, tuple(problem.key.split("."))))
            why = "the parser reads the same without the key" if without_it == read else reason(problem)
            counts[why] += 1
            faults += [] if why else [f"{problem.headline} | {problem.fix}"]
    print("\n".join(f"{count:5} {what}" for what, count in counts.most_common()))
    assert not faults, "\n".join(faults)
    assert tries < 2_000 or set(ON_PURPOSE) <= set(counts), "a reason that nothing is excused by"


@pytest.mark.parametrize(
    "section",
    [
        {"torch_autocast": {"enabled": True, "dtype": None}},
        {"torch_autocast": {"enabled": True, "dtype": "auto"}},
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": None}},
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": "auto"}},
        {"tensor_parallel": {"dtype": "auto"}},
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"max_batch_size": None}}}},
        {"data_efficiency": {"data_sampling": {"dynamic_batching": {"max_batch_size": "auto"}}}},
        {"zero_optimization": {"stage": 2, "cpu_offload": None, "cpu_offload_param": None}},
    ],
    ids=str,
)
def test_an_open_or_empty_key_is_none_to_deepspeed(section: Config, parser: Parser) -> None:
    """A key without a value does not reach the parser in a form that it refuses."""
    document, problems = checked({"zero_optimization": {"stage": 2}, **section})
    assert errors(problems) == []
    assert document is not None
    given = given_to_deepspeed(document, "cuda")
    assert given is not None
    assert parser.read(given)[1] == ""
    assert parser.read(with_a_batch(config_of_a_script(document)))[1] == ""


@pytest.mark.parametrize(
    ("value", "meant"), [("t", True), ("Y", True), ("1", True), (1.0, True), ("f", False), ("n", False), ("0", False)]
)
def test_switches_are_read_as_deepspeed_reads_them(value: Any, meant: bool, parser: Parser) -> None:
    """DeepSpeed's models read these as true and false. Here a warning says so too."""
    config = {"zero_optimization": {"stage": 1, "round_robin_gradients": value}, "train_batch_size": 1}
    document, (warning,) = checked({**config, "log_level": "info"})
    assert document is not None
    assert warning.headline.endswith(f"round_robin_gradients: read {json.dumps(value)} as {json.dumps(meant)}")
    assert document.deepspeed.value("zero_optimization", "round_robin_gradients") is meant
    read, _ = parser.read(config)
    assert read is not None
    assert read["zero_config"]["round_robin_gradients"] is meant


@pytest.mark.parametrize(("value", "device"), [("on", "cpu"), ("1", "cpu"), (1, "cpu"), (False, "none"), ("f", "none")])
def test_a_switch_that_became_a_device_is_read_as_deepspeed_reads_it(value: Any, device: str, parser: Parser) -> None:
    """Any spelling of true is the CPU. The warning says what to write."""
    config = {"zero_optimization": {"stage": 1, "cpu_offload": value}, "train_batch_size": 1}
    document, (warning,) = checked(config)
    assert document is not None
    assert warning.fix == f'Write zero_optimization.offload_optimizer.device: "{device}".'
    assert document.deepspeed.value("zero_optimization", "offload_optimizer", "device") == device
    read, _ = parser.read(config)
    assert read is not None
    assert (read["zero_config"]["offload_optimizer"] is None) == (device == "none")


def test_a_number_beyond_64_bits_is_no_integer(parser: Parser) -> None:
    """Both refuse it if written as a float. A smaller float is read as an integer.

    If written as an integer, DeepSpeed takes it, and torch fails in C++ after the start of all processes.
    """
    config: Config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e30}, "train_batch_size": 1}
    _, (error,) = checked(config)
    assert error.finding == "zero_optimization.reduce_bucket_size: 1e+30 is not legal here"
    assert error.fix == "Write an integer above 0 or auto (default 500000000)."
    assert "reduce_bucket_size" in parser.read(config)[1]
    config["zero_optimization"]["reduce_bucket_size"] = 2**63
    _, (error,) = checked(config)
    assert error.finding == "zero_optimization.reduce_bucket_size: 9223372036854775808 is not legal here"
    config["zero_optimization"]["reduce_bucket_size"] = 1e9
    assert checked(config)[1] == []
    assert parser.read(config)[1] == ""
