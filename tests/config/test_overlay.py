"""The one precedence: defaults, file, flags, code."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import overlay_code, overlay_flags
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.rules.training import Asked
from zero_plugin.config.tree import AUTO, KeyPath, Origin, Tree, same_value
from zero_plugin.errors import ConfigError

STAGE: KeyPath = ("deepspeed", "zero_optimization", "stage")
CLIPPING: KeyPath = ("deepspeed", "gradient_clipping")
PRECISION: KeyPath = ("mixed_precision",)


@pytest.fixture
def document() -> Document:
    file = Origin("file", "c.yaml:1:1")
    training = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": AUTO}},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}},
    }
    launch = {"mixed_precision": "bf16", "main_process_ip": None}
    return Document(Tree.from_nested(launch, lambda _: file), Tree.from_nested(training, lambda _: file))


def code(document: Document, values: dict[KeyPath, Any]) -> Document:
    return overlay_code(document, {path: (f"Accelerator({path[-1]}=…)", value) for path, value in values.items()})


def test_a_flag_overrides_the_file(document: Document) -> None:
    """A flag wins silently, and is then the value's origin."""
    laid = overlay_flags(document, {STAGE: ("--zero_stage", 3), PRECISION: ("--mixed_precision", "no")})
    entry = laid.deepspeed.get("zero_optimization", "stage")
    assert (entry.value, str(entry.origin)) == (3, "--zero_stage")
    assert laid.launch.value("mixed_precision") == "no"
    assert laid.deepspeed.value("gradient_clipping") == 1.0
    assert document.deepspeed.value("zero_optimization", "stage") == 2


def test_code_fills_what_is_open(document: Document) -> None:
    """Code sets open, absent, null and default values, and its call is their origin."""
    steps: KeyPath = ("deepspeed", "gradient_accumulation_steps")
    new: KeyPath = ("deepspeed", "bf16", "enabled")
    laid = code(document, {steps: 4, new: True, ("main_process_ip",): "10.0.0.1"})
    assert laid.deepspeed.value("gradient_accumulation_steps") == 4
    assert laid.deepspeed.get("bf16", "enabled").origin == Origin("code", "Accelerator(enabled=…)")
    assert laid.launch.value("main_process_ip") == "10.0.0.1"
    defaulted = document_from_mapping({"distributed_type": "DEEPSPEED"}, "config")
    assert code(defaulted, {STAGE: 3}).deepspeed.value("zero_optimization", "stage") == 3


def test_equal_values_never_clash(document: Document) -> None:
    """1 and 1.0, equal texts, equal lists agree and keep the file as origin. An open argument changes nothing."""
    betas: KeyPath = ("deepspeed", "optimizer", "params", "betas")
    laid = code(document, {CLIPPING: 1, PRECISION: "bf16", betas: [0.9, 0.99], STAGE: "auto"})
    assert laid.deepspeed == document.deepspeed
    assert laid.launch == document.launch


def test_every_clash_is_listed_at_once(document: Document) -> None:
    """One error has all pairs of code against explicit other values of file or flag, each with both places."""
    flagged = overlay_flags(document, {STAGE: ("--zero_stage", 3)})
    whole: KeyPath = ("deepspeed", "zero_optimization", "offload_optimizer")
    with pytest.raises(ConfigError) as caught:
        code(flagged, {STAGE: 1, CLIPPING: 0.5, PRECISION: "fp16", whole: None})
    found = {p.key: (p.where, p.message) for p in caught.value.problems}
    assert found == {
        "mixed_precision": ("Accelerator(mixed_precision=…)", '"fp16" in code, but "bf16" at c.yaml:1:1'),
        "zero_stage": ("Accelerator(stage=…)", "1 in code, but 3 at --zero_stage"),
        "gradient_clipping": ("Accelerator(gradient_clipping=…)", "0.5 in code, but 1.0 at c.yaml:1:1"),
        "zero_optimization.offload_optimizer.device": (
            "Accelerator(offload_optimizer=…)",
            'null in code, but "cpu" at c.yaml:1:1',
        ),
    }


@pytest.mark.parametrize("prefer", ["code", "file"])
def test_one_word_settles_every_clash(document: Document, prefer: str) -> None:
    """The preferred side counts for each pair, and a note names both. Values only in code still fill."""
    flagged = overlay_flags(document, {STAGE: ("--zero_stage", 3), ("prefer",): ("--prefer", prefer)})
    steps: KeyPath = ("deepspeed", "gradient_accumulation_steps")
    laid = code(flagged, {STAGE: 1, CLIPPING: 0.5, PRECISION: "fp16", steps: 4})
    code_counts = prefer == "code"
    assert laid.deepspeed.value("zero_optimization", "stage") == (1 if code_counts else 3)
    assert laid.deepspeed.value("gradient_clipping") == (0.5 if code_counts else 1.0)
    assert laid.launch.value("mixed_precision") == ("fp16" if code_counts else "bf16")
    assert laid.deepspeed.value("gradient_accumulation_steps") == 4
    notes = {note.key: note.headline for note in laid.notes}
    assert notes.keys() == {"zero_stage", "gradient_clipping", "mixed_precision"}
    said = "1 in code counts, not 3 at --zero_stage" if code_counts else "3 at --zero_stage counts, not 1 in code"
    assert notes["zero_stage"] == f"Accelerator(stage=…): zero_stage: {said}, since prefer is {prefer}"
    assert {note.severity for note in laid.notes} == {"note"}


@pytest.mark.parametrize(("prefer", "precision"), [("code", "fp16"), ("file", "bf16")])
@pytest.mark.parametrize("switch_in_code", [False, True])
def test_one_word_settles_the_precision(prefer: str, precision: str, switch_in_code: bool) -> None:
    """This also holds if one side uses `mixed_precision` and the other a section of DeepSpeed's."""
    sides = [({PRECISION: kind}, {("deepspeed", kind, "enabled"): True}) for kind in ("fp16", "bf16")]
    in_code, in_file = sides[0][switch_in_code], sides[1][not switch_in_code]
    written = overlay_flags(Document(), {path: ("f.yaml:1:1", value) for path, value in in_file.items()})
    with pytest.raises(ConfigError, match=r"f\.yaml:1:1"):
        check_document(code(written, in_code))
    laid = code(overlay_flags(written, {("prefer",): ("--prefer", prefer)}), in_code)
    check_document(laid)
    assert Asked(laid).precision == precision
    assert any("since prefer is" in note.message for note in laid.notes)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        ("a", "a", True),
        ((1, 2.0), (1.0, 2), True),
        ((1,), (1, 2), False),
        (AUTO, AUTO, True),
    ],
)
def test_same_value(one: Any, other: Any, same: bool) -> None:
    """Numbers compare by value, booleans only with booleans, lists item by item."""
    assert same_value(one, other) is same


def test_replacing_a_section() -> None:
    """In a tree, a scalar replaces the section at its path, and a leaf below replaces the scalar."""
    at = Origin("file", "f")
    tree = Tree.from_nested({"a": {"b": 1}, "c": None}, lambda _: at)
    assert tree.replace(Tree.from_nested({"a": None}, lambda _: at).entries).nested() == {"a": None, "c": None}
    assert tree.replace(Tree.from_nested({"a": {}}, lambda _: at).entries).nested() == {"a": {"b": 1}, "c": None}
    assert tree.replace(Tree.from_nested({"c": {"d": 2}}, lambda _: at).entries).nested() == {
        "a": {"b": 1},
        "c": {"d": 2},
    }
