"""A run's resolved values are kept in a file, and never fail the run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, MachineFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.run_files import RECORD_NAME, keep_record, write_record

CONFIG = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": "auto"}


def record(strategy: str = "deepspeed") -> dict[str, object]:
    document = document_from_mapping(CONFIG, "Accelerator(config=…)")
    facts = Facts(machine=MachineFacts(processes=2), strategy=strategy)  # type: ignore[arg-type]
    return resolve(document, facts).record


def test_the_record_holds_every_value_its_origin_and_deepspeeds_config(tmp_path: Path) -> None:
    """A typed value has its place, an `auto` its written place and the reason, an added value a reason."""
    file = write_record(record(), tmp_path)
    assert file == tmp_path / RECORD_NAME
    read = json.loads(file.read_text())
    values = {value.pop("path"): value for value in read["values"]}
    place = "Accelerator(config=…)"
    assert values["zero_optimization.stage"] == {"value": 2, "kind": "code", "where": place, "reason": ""}
    clipping = values["gradient_clipping"]
    assert (clipping["value"], clipping["kind"], clipping["where"]) == (0.0, "rule", place)
    assert clipping["reason"]
    assert values["train_batch_size"]["reason"] == "4 (micro batch) × 1 (accumulation) × 2 (processes)"
    assert values["train_batch_size"]["where"] == ""
    assert read["deepspeed_config"]["train_batch_size"] == 8
    assert (read["strategy"], read["accelerator"], read["processes"]) == ("deepspeed", "cpu", 2)
    assert set(read["versions"]) == {"zero-plugin", "deepspeed", "torch"}


def test_off_deepspeed_there_is_no_config_for_it() -> None:
    """Without DeepSpeed, it gets no config."""
    assert record("ddp")["deepspeed_config"] is None


def test_it_goes_to_the_log_folder_or_the_cache(tmp_path: Path) -> None:
    """`log_dir` comes first, then the variable, then the cache. The sentence says where."""
    logs, named, cache = (tmp_path / name for name in ("logs", "named", "cache"))
    environment = {"ZERO_PLUGIN_RUNS": str(named), "XDG_CACHE_HOME": str(cache)}
    for log_dir, environ, folder in (
        (str(logs), environment, logs),
        (None, environment, named),
        (None, {"XDG_CACHE_HOME": str(cache)}, cache / "zero_plugin/runs"),
    ):
        sentence = keep_record(record(), log_dir, environ)
        (file,) = folder.iterdir()
        assert sentence.endswith(f": {file}")
        assert json.loads(file.read_text())["processes"] == 2


def test_several_models_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    """No file is overwritten, also not by this process."""
    for _ in range(3):
        keep_record(record(), None, {"ZERO_PLUGIN_RUNS": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 3


def test_the_newest_twenty_stay_in_the_cache_and_all_in_a_log_folder(tmp_path: Path) -> None:
    """Old records go, other files stay. Files in the user's own folder are never deleted."""
    for number in range(30):
        (tmp_path / f"resolved-20200101-0000{number:02d}-1.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    keep_record(record(), str(tmp_path), {})
    assert len(list(tmp_path.iterdir())) == 32
    keep_record(record(), None, {"ZERO_PLUGIN_RUNS": str(tmp_path)})
    left = sorted(file.name for file in tmp_path.iterdir())
    assert len(left) == 21
    assert left[0] == "other.json"
    assert left[1] == "resolved-20200101-000012-1.json"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """The run continues without the file."""
    (tmp_path / "file").write_text("")
    sentence = keep_record(record(), None, {"ZERO_PLUGIN_RUNS": str(tmp_path / "file")})
    assert sentence.startswith(f"the resolved configuration is kept nowhere: {tmp_path / 'file'} cannot be written")


def test_a_user_without_a_home_gets_no_folder_named_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user with only a uid, and no HOME, keeps `~` unexpanded. No folder of that name appears."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    sentence = keep_record(record(), None, {})
    assert sentence == (
        "the resolved configuration is kept nowhere: ~/.cache/zero_plugin/runs cannot be written "
        "(this user has no home folder; set HOME)"
    )
    assert list(tmp_path.iterdir()) == []


_RUN = """
import sys
import torch
from zero_plugin import Accelerator

accelerator = Accelerator(cpu=True, config={"gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 3})
net = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
accelerator.save_model(model, sys.argv[1])
"""


def test_a_run_says_little_keeps_all_and_leaves_it_beside_the_weights(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The terminal has two lines, and one names the file with all values. ZERO_PLUGIN_VERBOSE adds lines."""
    done = run_python("-c", _RUN, tmp_path / "model", ZERO_PLUGIN_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "runs").iterdir()
    said = [line for line in done.stderr.splitlines() if line.startswith("zero_plugin: ")]
    assert said == ["zero_plugin: single on 1 × cpu", f"zero_plugin: every value and where it came from: {kept}"]
    assert (tmp_path / "model" / RECORD_NAME).read_text() == kept.read_text()
    values = {value["path"]: value["value"] for value in json.loads(kept.read_text())["values"]}
    assert (values["train_micro_batch_size_per_gpu"], values["train_batch_size"]) == (3, 3)
    again = run_python("-c", _RUN, tmp_path / "model", ZERO_PLUGIN_RUNS=str(tmp_path / "runs"), ZERO_PLUGIN_VERBOSE="1")
    chosen = "zero_plugin: gradient_clipping = 0: none is configured; clip_grad_norm_ in the loop still clips"
    assert chosen in again.stderr.splitlines()
