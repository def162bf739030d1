"""A document as text again: only comments change, for any reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as some

from zero_plugin.config.document import Document, accelerate_values, yaml_text
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.tree import Tree
from zero_plugin.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted((ROOT / "ds_configs").iterdir())
PUBLISHED = sorted(
    p for p in (ROOT.parent / "shared" / "configs").glob("*/*") if p.suffix in (".json", ".yaml", ".yml")
)


def values(tree: Tree) -> dict[Any, Any]:
    """Return values by path, with the type, which `==` does not distinguish: 1, 1.0 and True."""
    return {path: (repr(entry.value), entry.value) for path, entry in tree.entries.items()}


def assert_round_trips(document: Document, folder: Path) -> None:
    file = folder / "written.yaml"
    file.write_text(document.to_accelerate_yaml(), encoding="utf-8")
    again = read_document(file)
    assert again.problems == ()
    assert values(again.launch) == values(document.launch)
    assert values(again.deepspeed) == values(document.deepspeed)
    by_pyyaml = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert repr(by_pyyaml) == repr(accelerate_values(document.launch, document.deepspeed))

    file = folder / "written.json"
    file.write_text(json.dumps(document.to_deepspeed()), encoding="utf-8")
    again = read_document(file)
    assert values(again.launch) == {}
    assert values(again.deepspeed) == values(document.deepspeed)


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_our_files(file: Path, tmp_path: Path) -> None:
    """Every shipped file comes back equal, as YAML and, for its training part, as JSON."""
    assert_round_trips(read_document(file), tmp_path)


@pytest.mark.skipif(not PUBLISHED, reason="the published configuration files are not next to this checkout")
def test_published_files(tmp_path: Path) -> None:
    """Every readable published file comes back equal, even with illegal values."""
    whole = 0
    for file in PUBLISHED:
        try:
            document = read_document(file)
        except ConfigError:
            continue  # a template, which is no JSON yet
        if document.problems:
            with pytest.raises(ConfigError):
                document.to_accelerate_yaml()
        else:
            assert_round_trips(document, tmp_path)
            whole += 1
    assert whole > 70


TRAPS = ["no", "On", "y", "NO", "null", "~", "", "1", "1e5", "1_000", "0x1F", "0o17", "1:30", "2024-01-01", ".inf", "="]
TRAPS += [
    "<<",
    "- a",
    "a: b",
    "a #b",
    "#",
    "'",
    '"',
    "\\",
    "a\nb",
    "\t",
    " a ",
    "é",
    "😀",
    "\x85",
    "\u2028",
    "\ufeff",
    "@",
]
TEXT = some.sampled_from(TRAPS) | some.text(max_size=12)
FLOATS = some.floats(allow_nan=False, allow_infinity=False)
SCALARS = some.none() | some.booleans() | some.integers(-(10**20), 10**20) | FLOATS | TEXT | some.just("auto")
ANYTHING = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(TEXT.filter(str.isascii), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)  # other work shares the machine
@given(some.dictionaries(TEXT, ANYTHING, max_size=5))
def test_any_value_is_read_back_by_both_yaml_versions(mapping: dict[str, Any]) -> None:
    """PyYAML reads the written text as the same keys, values and types, commented or not."""
    text = yaml_text(mapping)
    assert repr(yaml.safe_load(text)) == repr(mapping)
    commented = yaml_text(mapping, {(key,): "A sentence: with # and 'quotes'." for key in mapping})
    assert repr(yaml.safe_load(commented)) == repr(mapping)


POSITIVE = some.integers(1, 10**12)
RATE = some.floats(1e-12, 1e12)
OPEN = some.just("auto")
PATHS = some.sampled_from(["/nvme", "C:\\disk", "no", "./a b", "~/x", "1", "ü/ö", "none"])
DEEPSPEED = some.fixed_dictionaries(
    {},
    optional={
        "train_batch_size": POSITIVE | OPEN,
        "gradient_accumulation_steps": POSITIVE | OPEN,
        "gradient_clipping": RATE | OPEN,
        "steps_per_print": POSITIVE,
        "optimizer": some.fixed_dictionaries(
            {"type": some.sampled_from(["AdamW", "Lion", "adam"])},
            optional={
                "params": some.fixed_dictionaries(
                    {}, optional={"lr": RATE | OPEN, "betas": OPEN | some.tuples(RATE, RATE).map(list)}
                )
            },
        ),
        "zero_optimization": some.fixed_dictionaries(
            {},
            optional={
                "stage": some.integers(0, 3) | OPEN,
                "reduce_bucket_size": POSITIVE | OPEN | RATE,
                "overlap_comm": some.booleans(),
                "stage3_gather_16bit_weights_on_model_save": some.booleans() | OPEN,
                **{
                    f"offload_{what}": some.fixed_dictionaries(
                        {},
                        optional={
                            "device": some.sampled_from(["none", "cpu", "nvme", "auto"]),
                            "nvme_path": PATHS | some.none(),
                            "pin_memory": some.booleans(),
                        },
                    )
                    for what in ("optimizer", "param")
                },
            },
        ),
        "flops_profiler": some.fixed_dictionaries({"enabled": some.booleans()}, optional={"output_file": PATHS}),
        "unknown": ANYTHING,
    },
)
LAUNCH = some.fixed_dictionaries(
    {},
    optional={
        "distributed_type": some.sampled_from(["NO", "MULTI_GPU", "DEEPSPEED"]),
        "mixed_precision": some.sampled_from(["no", "bf16", "auto"]),
        "num_processes": POSITIVE,
        "gpu_ids": some.sampled_from(["all", "0", "0,1"]),
        "main_process_ip": some.sampled_from(["10.0.0.1", "::1", "node-0"]),
        "zero3_init_flag": some.booleans(),
        "deepspeed_moe_layer_cls_names": some.sampled_from(["A", "A,B"]),
        "tpu_env": some.lists(TEXT, max_size=2),
        "fsdp_config": some.dictionaries(TEXT.filter(lambda key: not key.startswith("_")), SCALARS, max_size=2),
    },
)


@settings(deadline=None)
@given(LAUNCH, DEEPSPEED)
def test_any_document(
    tmp_path_factory: pytest.TempPathFactory, launch: dict[str, Any], deepspeed: dict[str, Any]
) -> None:
    """A document made in code comes back equal through either file, even with illegal values."""
    document = document_from_mapping({**launch, "deepspeed_config": deepspeed}, "code")
    assert_round_trips(document, tmp_path_factory.getbasetemp())


def test_layout() -> None:
    """Short fields for Accelerate's keys, DeepSpeed's names for others, numbers with a point, traps in quotes."""
    document = document_from_mapping(
        {
            "distributed_type": "NO",
            "debug": False,
            "deepspeed_config": {
                "gradient_accumulation_steps": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.95]}},
                "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/my disk"}},
                "zero3_init_flag": True,
            },
        },
        "code",
    )
    assert document.to_accelerate_yaml() == (
        'distributed_type: "NO"\n'
        "debug: false\n"
        "deepspeed_config:\n"
        "  zero3_init_flag: true\n"
        "  zero_stage: 3\n"
        "  offload_param_device: nvme\n"
        '  offload_param_nvme_path: "/my disk"\n'
        "  gradient_accumulation_steps: auto\n"
        "  optimizer:\n"
        "    type: AdamW\n"
        "    params:\n"
        "      lr: 5.0e-05\n"
        "      betas: [0.9, 0.95]\n"
    )


def test_zero_without_a_stage_stays_what_deepspeed_runs(tmp_path: Path) -> None:
    """A JSON without a stage is stage 0. Without a stage in the YAML, it would be read as Accelerate's 2."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    launch = tmp_path / "launch.yaml"
    launch.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    assert_round_trips(read_document(launch), tmp_path)
    path = ("distributed_type",)
    by_flag = read_document(tmp_path / "ds.json").overlay("flag", {path: ("--use_deepspeed", "DEEPSPEED")})
    launch.write_text(by_flag.to_accelerate_yaml())
    assert read_document(launch).deepspeed.value("zero_optimization", "stage") == 0


def test_what_was_not_read_whole_is_not_written(tmp_path: Path) -> None:
    """A duplicate key, or a missing named file, would be lost silently."""
    file = tmp_path / "twice.json"
    file.write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    for write in (Document.to_deepspeed, Document.to_accelerate_yaml):
        with pytest.raises(ConfigError, match="written twice"):
            write(read_document(file))


def test_comments_stand_beside_their_key_or_above() -> None:
    """They are on the same line if it ends within 120 columns, and otherwise on the line before."""
    values = {"a": 1, "b": {"c": "x" * 80}}
    comments = {("a",): "Short.", ("b",): "A section.", ("b", "c"): "Too long to stand on the same line."}
    assert yaml_text(values, comments) == (
        f"a: 1  # Short.\nb:  # A section.\n  # Too long to stand on the same line.\n  c: {'x' * 80}\n"
    )
