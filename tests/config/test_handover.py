"""The document through one environment variable, and what no input may do to the cold half."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.files import parse_file
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, from_environment, to_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.tree import AUTO, Origin, Tree
from zero_plugin.errors import ConfigError, Problem

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([AUTO, "cpu", "nvme", "2", "true", "AdamW", 2e8])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
origins = st.builds(Origin, st.sampled_from(["file", "flag", "code", "rule", "default"]), st.text(), st.text())
trees = st.builds(
    lambda nested, origin: Tree.from_nested(nested, lambda _: origin),
    st.dictionaries(st.text(), values, max_size=4),
    origins,
)
notes = st.builds(Problem, st.text(), st.text(), st.text(), st.text(), st.text(), st.sampled_from(["warning", "note"]))
documents = st.builds(
    Document,
    launch=trees,
    deepspeed=trees,
    sources=st.lists(st.text(), max_size=2).map(tuple),
    sections=st.dictionaries(st.lists(st.text(), min_size=1, max_size=3).map(tuple), st.text(), max_size=3),
    notes=st.lists(notes, max_size=2).map(tuple),
)

# Keys that mean something, so that generated configurations reach the rules behind the keys.
_TOP = st.sampled_from([*deepspeed_schema()["properties"], "zero_stage", "offload_param_device", "_note", "amp"])
_ZERO = st.sampled_from(list(deepspeed_schema()["properties"]["zero_optimization"]["properties"]))
_OFFLOAD = st.dictionaries(st.sampled_from(["device", "nvme_path", "ratio", "super_offload", "pin_memory"]), scalars)
_TYPED = st.fixed_dictionaries(
    {"type": st.sampled_from(["AdamW", "sgd", "WarmupLR", "x"]) | scalars},
    optional={"params": st.dictionaries(st.sampled_from(["lr", "betas", "warmup_num_steps"]), values)},
)
trainings = st.fixed_dictionaries(
    {},
    optional={
        "zero_optimization": st.dictionaries(_ZERO, values | _OFFLOAD, max_size=4),
        "optimizer": _TYPED,
        "scheduler": _TYPED,
        "fp16": st.dictionaries(st.just("enabled"), scalars),
        "bf16": st.dictionaries(st.just("enabled"), scalars),
        "train_batch_size": scalars,
        "train_micro_batch_size_per_gpu": scalars,
    },
) | st.dictionaries(_TOP, values, max_size=4)
launches = st.fixed_dictionaries(
    {"deepspeed_config": trainings | scalars},
    optional={
        "distributed_type": st.sampled_from(["DEEPSPEED", "FSDP", "NO"]) | scalars,
        "num_processes": scalars,
        "num_machines": scalars,
        "machine_rank": values,
        "mixed_precision": st.sampled_from(["no", "bf16", "fp16"]) | values,
        "parallelism_config": values,
        "gpu_ids": values,
    },
)


@given(documents)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_equal(document: Document) -> None:
    """What a worker reads equals what the launcher wrote, origins and AUTO included, in printable ASCII."""
    text = to_environment(document)
    assert text.isascii()
    assert text.isprintable()
    assert from_environment({ENVIRONMENT_VARIABLE: text}) == document


@given(launches | trainings)
@settings(max_examples=150, deadline=None)
def test_anything_is_accepted_or_refused_by_name(mapping: dict[str, Any]) -> None:
    """No mapping gives another error than ConfigError; an accepted one has launch settings and hands over unchanged."""
    try:
        document = document_from_mapping(mapping, "code")
        check_document(document)
    except ConfigError:
        return
    launch_settings(document)
    assert from_environment({ENVIRONMENT_VARIABLE: to_environment(document)}) == document


@given(
    st.text(alphabet=st.sampled_from("{}[]:,\"'#/*-&<>|!%@ \n\tatrue01.e~"), max_size=40),
    st.sampled_from(["c.yaml", "c.json"]),
)
@settings(max_examples=200, deadline=None)
def test_any_text_parses_or_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    """No text makes a parser fail in another way than by a ConfigError."""
    path = tmp_path_factory.getbasetemp() / name
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_file(path, []).value, dict)


def test_a_real_process_gets_it() -> None:
    """The text survives a real environment; without the variable there is no document."""
    document = document_from_mapping({"gradient_clipping": "auto", "wandb": {"project": 'a "b" é\n'}}, "code")
    code = (
        "import os; from zero_plugin.config.handover import from_environment as f;"
        "d = f(os.environ); print(d.deepspeed.value('gradient_clipping'), ascii(d.deepspeed.value('wandb', 'project')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, ENVIRONMENT_VARIABLE: to_environment(document)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == r"""AUTO 'a "b" \xe9\n'"""
    assert from_environment({}) is None


def test_a_document_too_large_for_the_system_is_refused() -> None:
    """A document beyond what one environment variable may hold is an error before any process starts."""
    document = document_from_mapping({"wandb": {"project": "x" * 140_000}}, "Accelerator(config=…)")
    with pytest.raises(ConfigError, match="bytes to hand over"):
        to_environment(document)
