"""Any field may be `auto`: each key of the schema is filled with a reason, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import (
    Facts,
    LoopFacts,
    MachineFacts,
    ModelFacts,
    OptimizerFacts,
    Resolved,
    SchedulerFacts,
)
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.schema import DEEPSPEED_AUTO, deepspeed_schema
from zero_plugin.config.tree import KeyPath, Origin, Tree, dotted, holds_auto
from zero_plugin.errors import ConfigError, Problem

SCHEMA = deepspeed_schema()
STAGE = ("zero_optimization", "stage")


def keys(section: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """List every key of the schema that holds a value rather than keys."""
    for name, child in section.get("properties", {}).items():
        if "properties" not in child and child.get("type") not in ("object", ["object", "null"]):
            yield (*path, name)
        yield from keys(child, (*path, name))


def parameters(section: str) -> Iterator[tuple[str, KeyPath]]:
    """Yield every parameter of every optimizer or schedule, with its type."""
    for branch in SCHEMA["properties"][section]["allOf"]:
        named = branch["if"]["properties"]["type"]
        for kind in named.get("enum", [named.get("const")]):
            for name in branch["then"]["properties"]["params"].get("properties", {}):
                yield kind, (section, "params", name)


CASES = [("", path) for path in keys(SCHEMA)] + [*parameters("optimizer"), *parameters("scheduler")]


def facts(accelerator: str) -> Facts:
    cuda = accelerator == "cuda"
    return Facts(
        LoopFacts(4, "the training DataLoader's batch_size"),
        MachineFacts("cuda" if cuda else "cpu", 2, True, cuda),
        ModelFacts(512, "model.config.hidden_size", 10**6, 10**8),
        OptimizerFacts(given={"lr": 1e-4}, group_lrs=(1e-4,), placeholder=True),
        SchedulerFacts(True, 100, 10),
    )


def document(path: KeyPath, kind: str) -> Document:
    """Build a valid configuration in which only `path` is open."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    if path[0] in ("optimizer", "scheduler"):
        config[path[0]] = {"type": kind or {"optimizer": "AdamW", "scheduler": "WarmupLR"}[path[0]]}
    if kind == "OneCycle":
        config["scheduler"]["params"] = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}
    node = config
    for part in path[:-1]:
        node = node.setdefault(part, {})
    node[path[-1]] = "auto"
    return document_from_mapping(config, "config")


def at_stage(document: Document, stage: int) -> Document:
    path = ("deepspeed", "zero_optimization", "stage")
    return document.overlay("code", {path: ("config", stage)})


def refusals(document: Document) -> set[str]:
    """Return the keys that the check refuses as they are written."""
    try:
        check_document(document)
    except ConfigError as error:
        return {problem.key for problem in error.problems}
    return set()


def attempt(asked: Document, known: Facts) -> tuple[Resolved | None, tuple[Problem, ...]]:
    try:
        return resolve(asked, known), ()
    except ConfigError as error:
        return None, error.problems


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{kind}-{dotted(path)}" for kind, path in CASES])
def test_auto_is_filled_or_refused_by_name(kind: str, path: KeyPath) -> None:
    """This holds at every stage, on a CPU and on a GPU. The word itself stays only as DeepSpeed's own value."""
    written = document(path, kind)
    if dotted(path) in refusals(written):
        return
    path = next(read for read, entry in written.deepspeed.entries.items() if holds_auto(entry.value))  # or its new name
    devices = ("cuda",) if kind == "Lamb" else ("cpu", "cuda")  # DeepSpeed's Lamb is refused on a CPU, whatever is auto
    for stage, accelerator in product(range(4), devices):
        asked = written if path == STAGE else at_stage(written, stage)
        resolved, problems = attempt(asked, facts(accelerator))
        if resolved is None:
            assert {problem.key for problem in problems} == {written.deepspeed.typed(*path)}
            assert all(problem.fix for problem in problems)
            continue
        entry = resolved.tree.get(*path)
        if path in DEEPSPEED_AUTO:
            assert entry is not None
            assert holds_auto(entry.value)
        elif entry is not None:  # a parameter that the running implementation does not take is left out
            assert not holds_auto(entry.value)
            assert entry.origin.kind in ("rule", "default")
            assert entry.origin.reason
        if stage == 3:
            again = resolve(Document(asked.launch.replace(resolved.launch.entries), resolved.tree), facts(accelerator))
            assert again.tree == resolved.tree


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"optimizer": {"params": {"betas": ["auto", 0.95]}}}, "optimizer.params.betas", (0.9, 0.95)),
        ({"data_parallel_size": "auto"}, "data_parallel_size", 2),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"global_batch_size": "auto"}}}},
            "data_efficiency.data_routing.random_ltd.global_batch_size",
            8,
        ),
    ],
)
def test_what_follows_from_other_values(config: dict[str, Any], key: str, value: Any) -> None:
    """Single elements of a list, and sizes that repeat others, are filled."""
    if "optimizer" in config:
        config["optimizer"]["type"] = "AdamW"
    entry = resolve(document_from_mapping(config, "config"), facts("cpu")).tree.get(*key.split("."))
    assert entry is not None
    assert entry.value == value


def test_a_list_is_never_filled_over_what_is_typed_in_it() -> None:
    """If the default's length differs from the list's, no element is guessed and none dropped."""
    config = {"comms_logger": {"prof_ops": ["all_reduce", "auto"]}}
    with pytest.raises(ConfigError, match="has an open element that nothing fills") as caught:
        resolve(document_from_mapping(config, "config"), facts("cpu"))
    assert caught.value.problems[0].key == "comms_logger.prof_ops"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (OptimizerFacts(given={"lr": 0.1}, group_lrs=(0.1,), placeholder=True), ("AdamW", None)),
        (OptimizerFacts("sgd", {"lr": 0.1, "momentum": 0.5}, (0.1,)), ("SGD", None)),
        (OptimizerFacts("adam", {"lr": 0.1, "weight_decay": 0.1}, (0.1,)), ("Adam", False)),
    ],
)
def test_the_type_may_be_auto(optimizer: OptimizerFacts, expected: tuple[str, bool | None]) -> None:
    """The type is the loop's optimizer's, and Adam with L2 stays so. For a placeholder the type is AdamW."""
    tree = Tree.from_nested({"optimizer": {"type": "auto"}}, lambda path: Origin("code", "config"))
    known = replace(facts("cuda"), optimizer=optimizer, scheduler=None)
    resolved = resolve(Document(deepspeed=tree), known)
    assert resolved.optimizer is not None
    assert (resolved.optimizer.type, resolved.optimizer.params.get("adam_w_mode")) == expected
    with pytest.raises(ConfigError, match="no optimizer to tell its type"):
        resolve(Document(deepspeed=tree), replace(known, optimizer=None))
