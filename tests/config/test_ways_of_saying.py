"""One verdict for one request: by a flag, a key of a file, an argument in code, or Accelerate's variables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_plugin.config.check import check_document
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, to_environment
from zero_plugin.config.find import find_document
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, launch_settings
from zero_plugin.config.resolve.facts import StrategyName
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.errors import ConfigError
from zero_plugin.launch.flags import document_from_flags

ZERO = "zero_optimization"
# The requests: the flag with its text, the key of a file with its value, and Accelerate's variable with its text.
REQUESTS: dict[str, tuple[tuple[str, Any], tuple[str, Any], tuple[str, str]]] = {
    "cpu": (("cpu", True), ("use_cpu", True), ("ACCELERATE_USE_CPU", "true")),
    "stage": (("zero_stage", "2"), ("deepspeed_config.zero_stage", 2), ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")),
    "precision": (("mixed_precision", "bf16"), ("mixed_precision", "bf16"), ("ACCELERATE_MIXED_PRECISION", "bf16")),
    "accumulation": (
        ("gradient_accumulation_steps", "4"),
        ("deepspeed_config.gradient_accumulation_steps", 4),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
    ),
    "clipping": (
        ("gradient_clipping", "0.5"),
        ("deepspeed_config.gradient_clipping", 0.5),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5"),
    ),
    "offload": (
        ("offload_optimizer_device", "cpu"),
        ("deepspeed_config.offload_optimizer_device", "cpu"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    ),
}
OF_ZERO = ("stage", "offload")
WAYS = ("flag", "file", "code", "environment")
# A launcher has flags and a file. A process started without one has Accelerate's variables. Code comes after both.
TOGETHER = [
    pair
    for pair in itertools.product(WAYS, WAYS)
    if set(pair) not in ({"flag", "environment"}, {"file", "environment"})
]


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content for dotted keys."""
    content: dict[str, Any] = {}
    for key, value in keys.items():
        *above, last = key.split(".")
        section = content
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return content


def said(ways: Mapping[str, str], folder: Path, start: Mapping[str, Any]) -> Document:
    """Return the checked document of a run with each request in its form, after the file's content."""
    flags = dict(REQUESTS[name][0] for name, way in ways.items() if way == "flag")
    written = {**start, **dict(REQUESTS[name][1] for name, way in ways.items() if way == "file")}
    code = dict(REQUESTS[name][1] for name, way in ways.items() if way == "code")
    environ = dict(REQUESTS[name][2] for name, way in ways.items() if way == "environment")
    if any(ways.get(name) == "environment" for name in OF_ZERO):
        environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if written:
        (folder / "c.yaml").write_text(yaml.safe_dump(nested(written)))
        flags["config_file"] = str(folder / "c.yaml")
    if flags:
        launched = document_from_flags(flags)
        environ[ENVIRONMENT_VARIABLE] = to_environment(launched)
    document = find_document(nested(code) if code else None, environ)
    check_document(document)
    return document


def verdict(document: Document) -> dict[str, Any]:
    """Return the run's properties that are visible without running."""
    settings = launch_settings(document)
    strategy: StrategyName = "deepspeed" if asks_for_deepspeed(document, settings) else "ddp"
    resolved = resolve_before_run(document, accelerator="cpu", processes=2, strategy=strategy)
    return {
        "cpu": asks_for_cpu(settings),
        "strategy": strategy,
        "stage": resolved.tree.value("zero_optimization", "stage", default=0),
        "precision": resolved.precision,
        "accumulation": resolved.accumulation,
        "clipping": resolved.clipping,
        "offload": resolved.tree.value("zero_optimization", "offload_optimizer", "device", default="none"),
    }


ALONE = {
    "cpu": False,
    "strategy": "ddp",
    "stage": 0,
    "precision": "no",
    "accumulation": 1,
    "clipping": None,
    "offload": "none",
}
WANTED = {"cpu": True, "stage": 2, "precision": "bf16", "accumulation": 4, "clipping": 0.5, "offload": "cpu"}


def wanted(names: Iterable[str]) -> dict[str, Any]:
    """Return the expected verdict on these requests."""
    strategy = "deepspeed" if set(names) & set(OF_ZERO) else "ddp"
    return {**ALONE, "strategy": strategy, **{name: WANTED[name] for name in names}}


@pytest.fixture(autouse=True)
def _no_file_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names",
    [("cpu",), ("stage",), ("precision",), ("cpu", "stage"), ("cpu", "precision", "accumulation", "clipping"), WANTED],
    ids="-".join,
)
def test_each_way_says_the_same(names: Iterable[str], way: str, tmp_path: Path) -> None:
    """A run's device, strategy and values do not depend on where they are written."""
    assert verdict(said(dict.fromkeys(names, way), tmp_path, {})) == wanted(names)


@pytest.mark.parametrize(("device", "zero"), TOGETHER, ids="-".join)
def test_the_cpu_and_zero_go_together(device: str, zero: str, tmp_path: Path) -> None:
    """Wherever the device is chosen and ZeRO is requested, the device removes nothing from ZeRO."""
    ways = {"cpu": device, "stage": zero, "accumulation": zero, "precision": device}
    start = {} if "environment" in (device, zero) else {"num_processes": 2}
    assert verdict(said(ways, tmp_path, start)) == wanted(ways)


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_CPU", "NO"])
@pytest.mark.parametrize("device", ["flag", "file"])
def test_a_type_without_zero_that_a_file_names_counts(kind: str, device: str, tmp_path: Path) -> None:
    """A file that requests a run without ZeRO gets one on the CPU. GPUs and the CPU in one file are an error."""
    ways, start = {"cpu": device}, {"distributed_type": kind, "deepspeed_config.zero_stage": 2}
    if (kind, device) == ("MULTI_GPU", "file"):
        with pytest.raises(ConfigError, match="use_cpu: true, but distributed_type is MULTI_GPU"):
            said(ways, tmp_path, start)
    else:
        assert verdict(said(ways, tmp_path, start)) == {**wanted(ways), "stage": 2}
