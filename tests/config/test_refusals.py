"""Refusals that involve several files, a dict in code or a path."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.errors import ConfigError

YAML = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"


def test_all_faults_of_all_files_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the YAML and of the JSON that it names are in one error, in reading order."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"fp16": {"enabled": 7},\n "zero_optimization": {"stage": 9}}')
    Path("c.yaml").write_text("num_procs: 2\n" + YAML + "  deepspeed_config_file: ds.json\n  zero3_init_flag: 5\n")
    with pytest.raises(ConfigError) as caught:
        check_document(read_document("c.yaml"))
    assert [p.where for p in caught.value.problems] == ["c.yaml:1:1", "c.yaml:6:3", "ds.json:1:11", "ds.json:2:24"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("yaml_fields", "json_text", "place"),
    [
        ("  zero_stage: 2\n", '{"zero_optimization": {"stage": 3}}', "c.yaml:5:3"),
        ("  gradient_clipping: 0.5\n", '{"gradient_clipping": 1.0}', "c.yaml:5:3"),
        ("  offload_optimizer_device: none\n", '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "c.yaml:5:3"),
        ("  zero_optimization: {stage: 1}\n", '{"zero_optimization": {"stage": 2}}', "c.yaml:5:23"),
    ],
)  # fmt: skip
def test_short_field_against_the_named_file(
    yaml_fields: str, json_text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML field that differs from the file it names is a problem with both places."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json_text)
    Path("c.yaml").write_text(YAML + "  deepspeed_config_file: ds.json\n" + yaml_fields)
    with pytest.raises(ConfigError) as caught:
        check_document(read_document("c.yaml"))
    (problem,) = caught.value.problems
    assert problem.where == place
    assert "at ds.json:1:" in problem.message


def test_two_names_for_the_training_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `deepspeed_config` names a training file and another key does too, neither is dropped silently."""
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("{}")
    Path("c.yaml").write_text("deepspeed_config: {deepspeed_config_file: a.json}\ndeepspeed_config_file: b.json\n")
    with pytest.raises(
        ConfigError, match=r'c\.yaml:2:1: deepspeed_config_file: "b\.json" here, but "a\.json" at c\.yaml:1'
    ):
        check_document(read_document("c.yaml"))


def test_a_folder_where_a_file_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a training file that is a folder calls it a folder, not missing."""
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("c.yaml").write_text("deepspeed_config: {deepspeed_config_file: conf}\n")
    with pytest.raises(ConfigError, match="conf is a folder; name a file in it"):
        check_document(read_document("c.yaml"))


def test_a_missing_file_names_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a mistyped path has the nearest name in that folder.

    A shared extension alone makes no name near.
    """
    monkeypatch.chdir(tmp_path)
    Path("zero3.yaml").write_text("num_processes: 1\n")
    with pytest.raises(ConfigError, match=r"zero33\.yaml: no such file\n.*Did you mean zero3\.yaml"):
        read_document("zero33.yaml")
    Path("zero3.json").write_text("{}")
    for wrong, right in {
        "zreo3.json": "zero3.json",
        "zero3.yml": "zero3",
        "other.yaml": "Check",
        "z.yaml": "Check",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_document(wrong)
        assert caught.value.problems[0].fix.removeprefix("Did you mean ").startswith(right)
    with pytest.raises(ConfigError, match="cannot be read: is a directory"):
        read_document(tmp_path)


@pytest.mark.parametrize("config", [3, ["zero2.yaml"], b"zero2.yaml", None], ids=str)
def test_a_config_that_is_neither_path_nor_dict(config: object) -> None:
    """The error has the value and the legal forms, instead of a TypeError from inside."""
    with pytest.raises(ConfigError, match=r"neither a path nor a dict\n.*launch YAML or a DeepSpeed JSON, or a dict"):
        read_document(config)  # type: ignore[arg-type]


def test_a_dict_names_the_call() -> None:
    """A fault in a dict from code is located at the call. A value that is not plain is refused by type."""
    with pytest.raises(ConfigError, match=r"Accelerator\(config=…\): zero_optimization\.stge = 1: unknown key"):
        check_document(document_from_mapping({"zero_optimization": {"stge": 1}}, "Accelerator(config=…)"))
    with pytest.raises(ConfigError, match="fp16: a object is no plain value"):
        document_from_mapping({"fp16": object()}, "Accelerator(config=…)")
    nested: dict[str, object] = {}
    nested["fp16"] = nested
    with pytest.raises(ConfigError, match="nested deeper"):
        document_from_mapping(nested, "Accelerator(config=…)")


def test_auto_is_no_contradiction(tmp_path: Path) -> None:
    """Open fields contradict nothing."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "mixed_precision: bf16\nnum_processes: 2\ndeepspeed_config:\n"
        "  fp16: {enabled: auto}\n  bf16: {enabled: auto}\n  train_batch_size: auto\n"
        "  train_micro_batch_size_per_gpu: 3\n  gradient_clipping: auto\n  steps_per_print: null\n"
        "  optimizer: {type: AdamW, params: {betas: [auto, 0.95]}}\n"
        "  zero_optimization:\n    stage: auto\n    offload_param: {device: nvme, nvme_path: auto}\n"
        "  scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: 100}}\n"
    )
    check_document(read_document(path))
