"""Generated documents and damaged files either run or are refused by name."""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from zero_plugin.config.check import check_document
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, from_environment, to_environment
from zero_plugin.config.keys import SHORT_FIELDS
from zero_plugin.config.launch_settings import launch_schema, launch_settings
from zero_plugin.config.read import document_from_mapping, read_document
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
from zero_plugin.config.schema import deepspeed_schema
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError

Schema = Mapping[str, Any]
Values = st.SearchStrategy[Any]

SECONDS = 1.0  # for one file of a few kilobytes, on a busy machine too
SHORT = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
LONG = settings(SHORT, max_examples=4_000, derandomize=False, print_blob=True)

# Wrong for most keys, and YAML's and JSON's results for typos.
STRAY = st.sampled_from(
    [None, True, False, -1, 0, 1, 0.5, 1e30, 10**40, "", "2e8", "true", "none", "x", [], [1], ["auto"], {}, {"a": 1}]
)
ODD: Values = st.recursive(
    STRAY | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(AUTO),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CORE = ("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "train_batch_size", "gradient_clipping")


def legal_values(schema: Schema, *, slips: bool = False) -> Values:
    """Draw values that the schema allows at this place. Sections may hold a typo."""
    if "anyOf" in schema:
        return st.one_of([legal_values(branch, slips=slips) for branch in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    if "properties" in schema:
        return sections(schema, slips=slips)
    kinds = schema.get("type", "object")
    return st.one_of([_of_type(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of_type(kind: str, schema: Schema) -> Values:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 2_000_000_000)
    if kind == "integer":
        powers = st.sampled_from([n for n in (0, 1, 2, 3, 4, 8, 64, 10**6) if int(low) < n <= high] or [int(high)])
        return powers | powers | st.integers(int(low) + ("exclusiveMinimum" in schema), int(high))
    if kind == "number":
        top = min(high, schema.get("exclusiveMaximum", high))
        return st.floats(low, top, exclude_min="exclusiveMinimum" in schema, exclude_max="exclusiveMaximum" in schema)
    if kind == "array":
        return st.lists(
            legal_values(schema.get("items", {"type": "string"})),
            min_size=schema.get("minItems", 0),
            max_size=schema.get("maxItems", 3),
        )
    words = st.sampled_from(["x", "cpu", "/tmp/x", "AUTO", "1"])
    return {"boolean": st.booleans(), "null": st.none(), "string": words, "object": st.just({})}[kind]


@st.composite
def sections(draw: st.DrawFn, schema: Schema, first: tuple[str, ...] = (), *, slips: bool = False) -> dict[str, Any]:
    """Draw a section with a few of its keys, each legal or open. With typos, values may be broken and names wrong."""
    properties = dict(schema["properties"])
    found: dict[str, Any] = {}
    if "allOf" in schema:  # a type that decides which parameters exist
        branch = draw(st.sampled_from(schema["allOf"]))
        found["type"] = draw(legal_values(branch["if"]["properties"]["type"]) | st.just("auto"))
        properties["params"] = branch["then"]["properties"]["params"]
    keys = st.sampled_from(sorted(properties))
    likely = st.sampled_from([key for key in first if key in properties] or sorted(properties))
    for key in draw(st.lists(likely | keys, max_size=6, unique=True)):
        if key in found:
            continue
        chance = draw(st.integers(0, 19))
        name = key + "s" if slips and chance == 0 else key
        value = legal_values(properties[key], slips=slips)
        if slips and chance == 1:
            value = STRAY
        elif slips and chance == 2:
            value = ODD
        elif chance < 6 and {"const": "auto"} in properties[key].get("anyOf", ()):
            value = st.just("auto")
        found[name] = draw(value)
    return found


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a DeepSpeed configuration, or launch keys with one inside."""
    slips = draw(st.integers(0, 3)) == 0
    training = draw(sections(deepspeed_schema(), CORE, slips=slips))
    if draw(st.booleans()):
        return training
    fields = {name: _at(deepspeed_schema(), path) for name, path in SHORT_FIELDS.items()}
    short = draw(sections({"properties": fields}, slips=slips))
    launch = draw(sections(launch_schema(), ("distributed_type", "mixed_precision", "num_processes"), slips=slips))
    return {**launch, "deepspeed_config": {**training, **short}}


def _at(schema: Schema, path: tuple[str, ...]) -> Schema:
    for key in path:
        schema = schema["properties"][key]
    return schema


def optional(strategy: st.SearchStrategy[Any]) -> Values:
    return st.none() | strategy


facts = st.builds(
    Facts,
    loop=st.builds(LoopFacts, optional(st.integers(1, 8)), st.just("the loader"), st.booleans()),
    machine=st.builds(
        MachineFacts, st.sampled_from(["cpu", "cuda", "xla"]), st.sampled_from([1, 2, 8]), st.booleans(), st.booleans()
    ),
    model=optional(st.builds(ModelFacts, optional(st.integers(1, 8192)), st.just("config"), st.integers(0, 10**9))),
    optimizer=optional(
        st.builds(OptimizerFacts, given=st.sampled_from([{}, {"lr": 1e-3}, {"eps": 1e-6}]), placeholder=st.just(True))
        | st.builds(
            OptimizerFacts,
            st.sampled_from(["adamw", "sgd", "adafactor"]),
            st.just({"lr": 1e-3, "weight_decay": 0.1}),
            st.sampled_from([(), (1e-3,), (1e-3, 1e-4)]),
        )
    ),
    scheduler=optional(
        st.builds(SchedulerFacts, st.booleans(), optional(st.integers(1, 100)), optional(st.integers(0, 100)))
    ),
    split_batches=st.booleans(),
    strategy=st.sampled_from(["deepspeed", "deepspeed", "ddp", "single", "xla"]),
)


def accepted(mapping: dict[str, Any]) -> Document | None:
    """Return the checked document, or None if it was refused by name."""
    with contextlib.suppress(ConfigError):
        document = document_from_mapping(mapping, "Accelerator(config=…)")
        check_document(document)
        return document
    return None


def resolved_or_refused(document: Document, known: Facts) -> Resolved | None:
    with contextlib.suppress(ConfigError):
        return resolve(document, known)
    return None


def hold_a_document_to_its_promises(mapping: dict[str, Any], known: Facts) -> None:
    raw = copy.deepcopy(mapping)
    document = accepted(mapping)
    assert mapping == raw
    if document is None:
        return
    handed = to_environment(document)
    assert from_environment({ENVIRONMENT_VARIABLE: handed}) == document
    launch_settings(document)
    found = resolved_or_refused(document, known)
    assert to_environment(document) == handed
    if found is None:
        return
    values = {path: entry.value for path, entry in found.tree.entries.items()}
    again = replace(document, deepspeed=found.tree, launch=document.launch.replace(found.launch.entries))
    twice = resolve(again, known)
    assert {path: entry.value for path, entry in twice.tree.entries.items()} == values
    assert {path: entry.value for path, entry in twice.launch.entries.items()} == {
        path: entry.value for path, entry in found.launch.entries.items()
    }


@given(mappings(), facts)
@SHORT
def test_a_document_runs_or_is_refused_by_name(mapping: dict[str, Any], known: Facts) -> None:
    """No traceback occurs. Resolving twice changes nothing, the input and document stay, and the handover is exact."""
    hold_a_document_to_its_promises(mapping, known)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 9))
def test_documents_at_length(number: int) -> None:
    """The same holds with other seeds, for long."""

    @seed(number)
    @given(mappings(), facts)
    @LONG
    def hold(mapping: dict[str, Any], known: Facts) -> None:
        hold_a_document_to_its_promises(mapping, known)

    hold()


def test_the_documents_reach_the_rules() -> None:
    """A good part of the generated documents is accepted, and a good part of these resolves."""
    seen: list[str] = []

    @given(mappings(), facts)
    @settings(SHORT, max_examples=100)
    def look(mapping: dict[str, Any], known: Facts) -> None:
        document = accepted(mapping)
        found = document and resolved_or_refused(document, known)
        seen.append("refused" if document is None else "resolved" if found else "unresolved")

    look()
    assert min(seen.count(kind) for kind in ("refused", "resolved", "unresolved")) > 1, Counter(seen)


# --- text

OWN = """# a launch file
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 2
_base: &base {stage: 2, reduce_bucket_size: 2e8}
deepspeed_config:
  zero_optimization:
    <<: *base
    offload_optimizer: {device: cpu, pin_memory: true}
  optimizer: {type: AdamW, params: {lr: 5e-5, betas: [0.9, auto]}}
  gradient_clipping: "auto"
"""
SHIPPED = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.*"))
PUBLISHED = sorted((Path(__file__).resolve().parents[3] / "shared" / "configs").glob("*/*.*"))
TEXTS = [OWN.encode(), *(path.read_bytes() for path in [*SHIPPED, *PUBLISHED] if path.suffix != ".md")]
INSERTS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"'",
    b":",
    b",",
    b"#",
    b"/*",
    b"*a",
    b"&a ",
    b"!!x ",
    b"\t",
    b"\n",
    b"\r",
    b"\0",
]
INSERTS += ["\ufeff".encode(), "“".encode(), b"\xff", b"<<: ", b"---\n", b"- ", b"? ", b"| ", b"%", b"1e999", b"NaN"]


def flip_bytes(text: bytes, chance: random.Random) -> bytes:
    bent = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        bent[chance.randrange(len(bent))] ^= 1 << chance.randrange(8)
    return bytes(bent)


def swap_lines(text: bytes, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def truncate(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def insert(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + chance.choice(INSERTS) + text[at:]


def indent(text: bytes, chance: random.Random) -> bytes:
    lines = text.splitlines(keepends=True)
    lines[chance.randrange(len(lines))] = b"  " + lines[chance.randrange(len(lines))]
    return b"".join(lines)


def splice(text: bytes, chance: random.Random) -> bytes:
    other = chance.choice(TEXTS)
    return text[: chance.randrange(len(text))] + other[chance.randrange(len(other)) :]


BENDS: list[Callable[[bytes, random.Random], bytes]] = [flip_bytes, swap_lines, truncate, insert, indent, splice]


def read_or_refused(path: Path, content: bytes) -> None:
    """Read and check within the time, with no other exception than ConfigError."""
    path.write_bytes(content)
    start = time.process_time()
    with contextlib.suppress(ConfigError):
        check_document(read_document(path))
    assert time.process_time() - start < SECONDS, content


def bend_files(folder: Path, count: int, number: int) -> None:
    chance = random.Random(number)
    for _ in range(count):
        text = chance.choice(TEXTS)
        for _ in range(chance.choice((1, 1, 2, 3))):
            text = chance.choice(BENDS)(text or b" ", chance)
        read_or_refused(folder / chance.choice(("c.yaml", "c.json")), text)


def test_bent_files(tmp_path: Path) -> None:
    """Real files with bytes flipped, lines swapped, cut off or spliced are read or refused by name, within a second."""
    bend_files(tmp_path, 250, number=0)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(1, 9))
def test_bent_files_at_length(tmp_path: Path, number: int) -> None:
    """The same holds with other seeds, for long."""
    bend_files(tmp_path, 4000, number)


MARKS = st.text("{}[]:,\"'#/*-&<>|!%@ \n\ta1.e~", max_size=40)


@given(st.binary(max_size=60) | (st.text(max_size=60) | MARKS).map(str.encode), st.sampled_from(["c.yaml", "c.json"]))
@settings(SHORT, max_examples=200)
def test_any_bytes(tmp_path: Path, content: bytes, name: str) -> None:
    """No bytes cause another exception than ConfigError, or take long."""
    read_or_refused(tmp_path / name, content)
