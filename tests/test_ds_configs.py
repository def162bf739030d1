"""The ready configs in `ds_configs/` are right, and each JSON equals its YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.cli.check import check_files
from zero_plugin.config.check import check_document
from zero_plugin.config.read import document_from_code, read_document
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError
from zero_plugin.launch.flags import document_from_flags

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
    """The folder has exactly these."""
    assert {file.name for file in FOLDER.iterdir()} == {
        "auto.yaml",
        "ddp.yaml",
        "cpu.yaml",
        "tpu.yaml",
        *(f"{name}.{kind}" for name in ZERO for kind in ("json", "yaml")),
    }


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_every_config_passes_the_check_without_a_note(file: Path) -> None:
    """They have no problem and no guessed value."""
    document = read_document(str(file))
    check_document(document)
    assert document.notes == ()


@pytest.mark.parametrize("name", ZERO)
def test_stage_and_offload_are_what_the_name_says(name: str) -> None:
    """The YAML has its stage and devices. Values that depend on the loop are `auto`. The JSON is the same.

    The optimizer and the schedule are the script's, except in the files for placeholders. No schedule built from the
    loader's length ends at half.
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
    """auto.yaml sets neither stage nor device, and leaves optimizer and schedule to the script."""
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


@pytest.mark.parametrize("named", ["zero2", "zero3_offload", "cpu", "auto"])
def test_a_ready_config_is_found_by_its_name(named: str) -> None:
    """`launch`, `check` and `Accelerator(config=…)` find it in any folder."""
    wanted = read_document(str(FOLDER / f"{named}.yaml"))
    for document in (document_from_flags({"config_file": named}), document_from_code(named, "a call")):
        assert (document.launch.nested(), document.deepspeed.nested()) == (
            wanted.launch.nested(),
            wanted.deepspeed.nested(),
        )
    assert check_files([named]).problems == ()


def test_a_file_of_that_name_is_meant_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero2").write_text("num_processes: 7")
    assert document_from_flags({"config_file": "zero2"}).launch.value("num_processes") == 7


@pytest.mark.parametrize(("named", "near"), [("zero_2", "Did you mean zero2? "), ("mine", "")])
def test_a_name_that_is_none_lists_them(named: str, near: str) -> None:
    """Launch and check list the same names."""
    fix = f"{near}Write a path, or a ready config: auto, cpu, ddp, tpu, zero1, zero2, zero2_offload, "
    with pytest.raises(ConfigError) as error:
        document_from_flags({"config_file": named})
    for problem in (*error.value.problems, *check_files([named]).problems):
        assert (problem.where, problem.message) == (named, "no such file")
        assert problem.fix.startswith(fix)
