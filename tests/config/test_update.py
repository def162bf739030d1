"""`--update` rewrites a configuration in today's keys, and the run stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.config.check import find_problems
from zero_plugin.config.commented import update_config
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING, launch_settings
from zero_plugin.config.read import read_document
from zero_plugin.config.tree import Tree
from zero_plugin.errors import ConfigError

PUBLISHED = sorted(
    path
    for path in (Path(__file__).resolve().parents[3] / "shared" / "configs").glob("*/*")
    if path.suffix in (".json", ".yaml", ".yml")
)


def values(tree: Tree) -> dict[Any, Any]:
    return {path: (repr(entry.value), entry.value) for path, entry in tree.entries.items()}


def is_right(document: Document) -> bool:
    return all(problem.severity != "error" for problem in find_problems(document))


@pytest.mark.skipif(not PUBLISHED, reason="the published configuration files are not next to this checkout")
def test_published_files(tmp_path: Path) -> None:
    """The new file gives the same run as the old one. Only keys without effect here are lost."""
    updated = 0
    for path in PUBLISHED:
        file = tmp_path / path.name
        file.write_bytes(path.read_bytes())
        try:
            before = read_document(file)
        except ConfigError:
            continue
        if not is_right(before):
            with pytest.raises(ConfigError):
                update_config(file)
            assert file.read_bytes() == path.read_bytes()
            continue
        update_config(file)
        after = read_document(file)
        assert is_right(after)
        assert values(after.deepspeed) == values(before.deepspeed)
        assert launch_settings(after) == launch_settings(before)
        lost = values(before.launch).keys() - values(after.launch).keys()
        assert {key for key, *_ in lost} <= {*WITHOUT_MEANING, *REFUSED_KEYS}
        updated += 1
    assert updated > 30


def test_other_spellings_become_todays(tmp_path: Path) -> None:
    """A DeepSpeed JSON stays one. Aliases, texts for numbers and deprecated keys get the documented form."""
    file = tmp_path / "ds.json"
    file.write_text(
        """{
        // hand-made
        "train_batch_size": "16",
        "zero_optimization": {"stage": 3, "cpu_offload": true, "stage3_gather_fp16_weights_on_model_save": "true"}
        }"""
    )
    said = update_config(file)
    assert json.loads(file.read_text()) == {
        "train_batch_size": 16,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert any("cpu_offload" in line for line in said)
    assert update_config(file) == [f"{file}: nothing to change"]


def test_a_named_json_stays_named(tmp_path: Path) -> None:
    """The DeepSpeed JSON's values stay there, so a later change of it still counts."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": "auto"}')
    file = tmp_path / "launch.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\n"
        "scheduler_counts: steps\n"
        "deepspeed_config: {deepspeed_config_file: ds.json, gradient_clipping: 5e-1, zero3_init_flag: no}\n"
    )
    before = read_document(file)
    update_config(file)
    assert yaml.safe_load(file.read_text())["deepspeed_config"] == {
        "deepspeed_config_file": "ds.json",
        "zero3_init_flag": False,
        "gradient_clipping": 0.5,
    }
    after = read_document(file)
    assert values(after.deepspeed) == values(before.deepspeed)
    assert values(after.launch) == values(before.launch)


def test_a_json_that_accelerate_wrote_stays_json(tmp_path: Path) -> None:
    """Accelerate's `write_basic_config` writes launch keys in JSON files like this one."""
    file = tmp_path / "default_config.json"
    file.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "tpu_zone": None}))
    update_config(file)
    expected = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    assert json.loads(file.read_text()) == expected


def test_an_older_backup_is_kept(tmp_path: Path) -> None:
    """The second update does not overwrite the first backup. The file's mode stays."""
    file = tmp_path / "a.yaml"
    for text in ("num_processes: 2\n", "num_processes: 3\n"):
        file.write_text(text)
        file.chmod(0o600)
        update_config(file)
    assert (tmp_path / "a.yaml.bak").read_text() == "num_processes: 2\n"
    assert (tmp_path / "a.yaml.bak2").read_text() == "num_processes: 3\n"
    assert file.stat().st_mode & 0o777 == 0o600
