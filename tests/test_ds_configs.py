"""The ready configs in `ds_configs/` are right, and each JSON says what its YAML says."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.read import read_document
from zero_plugin.config.tree import AUTO

FOLDER = Path(__file__).parents[1] / "ds_configs"
ZERO = {
    "zero1": (1, None, None),
    "zero2": (2, None, None),
    "zero2_placeholders": (2, None, None),
    "zero2_offload": (2, "cpu", None),
    "zero3": (3, None, None),
    "zero3_offload": (3, "cpu", "cpu"),
    "zero3_nvme": (3, "nvme", "nvme"),
}


def test_no_config_is_forgotten() -> None:
    """The folder holds these and no others."""
    assert {file.name for file in FOLDER.iterdir()} == {
        "auto.yaml",
        "ddp.yaml",
        "cpu.yaml",
        "tpu.yaml",
        *(f"{name}.{kind}" for name in ZERO for kind in ("json", "yaml")),
    }


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_every_config_passes_the_check_without_a_note(file: Path) -> None:
    """No problem, and nothing that had to be guessed."""
    document = read_document(str(file))
    check_document(document)
    assert document.notes == ()


@pytest.mark.parametrize("name", ZERO)
def test_stage_and_offload_are_what_the_name_says(name: str) -> None:
    """The YAML asks for its stage and devices; all that depends on the loop is `auto`; the JSON is the same.

    The optimizer and the schedule are the script's, but in the files for placeholders, and no schedule that was built
    from the loader's length ends at half.
    """
    stage, optimizer, param = ZERO[name]
    document = read_document(str(FOLDER / f"{name}.yaml"))
    tree = document.deepspeed
    assert tree.value("zero_optimization", "stage") == stage
    assert tree.value("zero_optimization", "offload_optimizer", "device") == optimizer
    assert tree.value("zero_optimization", "offload_param", "device") == param
    for path in (("train_micro_batch_size_per_gpu",), ("gradient_clipping",)):
        assert tree.value(*path) is AUTO
    described = {section for section in ("optimizer", "scheduler") if tree.has_section(section)}
    assert described == ({"optimizer", "scheduler"} if "placeholders" in name else set())
    assert ("scheduler_counts",) not in document.launch
    assert read_document(str(FOLDER / f"{name}.json")).deepspeed.nested() == tree.nested()


def test_auto_leaves_the_plan_its_choices() -> None:
    """auto.yaml types neither stage nor device, and leaves optimizer and schedule to the script."""
    tree = read_document(str(FOLDER / "auto.yaml")).deepspeed
    for path in (
        ("stage",),
        ("offload_optimizer", "device"),
        ("offload_optimizer", "ratio"),
        ("offload_param", "device"),
    ):
        assert tree.value("zero_optimization", *path) is AUTO
    assert not tree.has_section("optimizer")
    assert not tree.has_section("scheduler")
