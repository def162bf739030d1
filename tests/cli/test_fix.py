"""`zero-plugin check --fix` renames and removes keys in place, and converts FSDP configurations to ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.cli.fix import fix_file
from zero_plugin.config.check import find_problems
from zero_plugin.config.edits import Edit, apply_edits
from zero_plugin.config.located import parse_text
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError

_PUBLISHED = sorted((Path(__file__).resolve().parents[3] / "shared" / "configs").glob("*/*.*"))

Run = Callable[..., tuple[int, str]]

JSON = """{
  // a comment
  "a": 1, // one
  "b": {"x": 1, "y": [1, 2], "z": 3},
  "c": {
    "d": true
  }
}
"""
YAML = """# top
a: 1  # one
b:
  # about x
  x: 1
  y: [1, 2]
  z: {p: 1, q: 2}

# about c
c: 'text'
d:
e: |
  lines
  more

f:
  g:
    - h: 1
      i: 2
"""


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        (JSON, [Edit(3, 3, "A")], JSON.replace('"a"', '"A"')),
        (JSON, [Edit(3, 3)], JSON.replace('  "a": 1, // one\n', "")),
        (JSON, [Edit(4, 9)], JSON.replace('"x": 1, ', "")),
        (JSON, [Edit(4, 30)], JSON.replace(', "z": 3', "")),
        (JSON, [Edit(4, 17), Edit(4, 30)], JSON.replace(', "y": [1, 2], "z": 3', "")),
        (JSON, [Edit(5, 3)], JSON.replace(',\n  "c": {\n    "d": true\n  }', "")),
        (JSON, [Edit(6, 5)], JSON.replace('    "d": true\n', "")),
        (YAML, [Edit(2, 1, "A")], YAML.replace("a: 1", "A: 1")),
        (YAML, [Edit(2, 1)], YAML.replace("a: 1  # one\n", "")),
        (YAML, [Edit(5, 3)], YAML.replace("  x: 1\n", "")),
        (YAML, [Edit(7, 7)], YAML.replace("p: 1, ", "")),
        (YAML, [Edit(3, 1)], YAML[: YAML.index("b:")] + YAML[YAML.index("\n# about c") :]),
        (YAML, [Edit(10, 1, "C")], YAML.replace("c: 'text'", "C: 'text'")),
        (YAML, [Edit(11, 1), Edit(12, 1)], YAML.replace("d:\ne: |\n  lines\n  more\n", "")),
        (YAML, [Edit(12, 1, text="e: 2")], YAML.replace("|\n  lines\n  more", "2")),
        (YAML, [Edit(17, 3)], YAML[: YAML.index("f:")] + "f: {}\n"),
        (YAML, [Edit(19, 7)], YAML.replace("      i: 2\n", "")),
        ('{"a": 1}', [Edit(1, 2)], "{}"),
        ("a: 1", [Edit(1, 1)], ""),
        ("a: &x 1\nb: *x\nc: 2\n", [Edit(2, 1)], "a: &x 1\nc: 2\n"),
        ('"a": 1\n', [Edit(1, 1, "b")], '"b": 1\n'),
        ("a: 1\r\nb: 2\r\n", [Edit(1, 1)], "b: 2\r\n"),
    ],
)
def test_an_edit_changes_its_key_and_nothing_else(text: str, edits: list[Edit], expected: str) -> None:
    """An edit changes its key only. Comments, blank lines and other keys stay, and the result can be parsed."""
    done = apply_edits(text, edits)
    assert done == expected
    parse_text(done or "{}", "file", [])


@pytest.mark.parametrize("text", [JSON, YAML])
def test_each_key_can_be_removed(text: str) -> None:
    """Each key can be removed, and the other keys keep their values."""
    root = parse_text(text, "file", [])

    def walk(node: Any) -> list[tuple[dict[str, Any], str]]:
        found = [(node.value, key) for key in node.value] if isinstance(node.value, dict) else []
        below = node.value.values() if isinstance(node.value, dict) else ()
        return found + [pair for child in below for pair in walk(child)]

    for section, key in walk(root):
        _, line, column = section[key].where.split(":")
        removed = section.pop(key)
        done = parse_text(apply_edits(text, [Edit(int(line), int(column))]), "file", [])
        assert done.plain() == root.plain(), key
        section[key] = removed


def test_a_place_without_a_key_is_an_error() -> None:
    """A place without the expected key is an error, and no text is changed."""
    for text in (JSON, YAML):
        with pytest.raises(ValueError, match=r"2:1|key"):
            apply_edits(text, [Edit(4, 2)])


@pytest.fixture
def run(run_command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """Return the exit code and the output of `check`."""
    return lambda *arguments: run_command("check", *arguments)[:2]


WRONG = """# my config
num_proceses: 2  # of one machine
mixed_precision: bf16
fp8_config: {backend: TE}
deepspeed_config:
  zero_stage: 2
  zero_optimization:
    overlap_com: true
"""
RIGHT = """# my config
num_processes: 2  # of one machine
mixed_precision: bf16
deepspeed_config:
  zero_stage: 2
  zero_optimization:
    overlap_comm: true
"""


def test_the_default_shows_a_diff_and_changes_nothing(tmp_path: Path, run: Run) -> None:
    """The default prints a diff and changes no file, then lists the remaining problems of the fixed text."""
    file = tmp_path / "c.yaml"
    file.write_text(WRONG)
    code, output = run("--fix", str(file))
    assert code == 0, output
    assert "-num_proceses: 2  # of one machine\n+num_processes: 2  # of one machine" in output
    assert "no problem found" in output
    assert file.read_text() == WRONG


def test_write_changes_the_file_once(tmp_path: Path, run: Run) -> None:
    """`--write` changes the file once. A second run has nothing to fix."""
    file = tmp_path / "c.yaml"
    file.write_text("\ufeff" + WRONG)
    assert "written" in run("--fix", "--write", str(file))[1]
    assert file.read_text() == "\ufeff" + RIGHT
    again = run("--fix", "--write", str(file))
    assert "written" not in again[1]
    assert file.read_text() == "\ufeff" + RIGHT


def test_output_writes_another_file(tmp_path: Path, run: Run) -> None:
    """`--output` writes another file and leaves the original."""
    file, fixed = tmp_path / "c.yaml", tmp_path / "fixed.yaml"
    file.write_text(WRONG)
    assert run("--fix", str(file), "--output", str(fixed))[0] == 0
    assert (file.read_text(), fixed.read_text()) == (WRONG, RIGHT)


def test_values_and_doubtful_keys_are_left(tmp_path: Path, run: Run) -> None:
    """Values and ambiguous keys are left for the user to decide."""
    text = "mixed_precision: bf61\ndeepspeed_config:\n  zero_optimization:\n    offload: cpu\n"
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert run("--fix", "--write", str(file))[0] == 2
    assert file.read_text() == text


def test_what_is_removed_is_named(tmp_path: Path) -> None:
    """A removed section is named, because DeepSpeed once used it."""
    file = tmp_path / "c.json"
    file.write_text(
        '{"zero_optimization": {"stage": 1}, "compression_training": {"layer_reduction": {"enabled": true}}}'
    )
    fixed = fix_file(str(file))
    assert fixed.after == '{"zero_optimization": {"stage": 1}}'
    assert fixed.notes[0].startswith("compression_training is removed with its value: removed in DeepSpeed 0.19.7")


FSDP1 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: {offload}
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: {state}
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: {checkpointing}
  fsdp_use_orig_params: true
# of the machine
mixed_precision: bf16
num_machines: {machines}
num_processes: 8
"""
FSDP2 = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {after}
  fsdp_mixed_precision_policy: {policy}
num_processes: 8
mixed_precision: 'no'
"""
USUAL = {"offload": "false", "strategy": "FULL_SHARD", "state": "SHARDED_STATE_DICT", "checkpointing": "false"}
STAGE_3 = {"zero_optimization.stage": 3}


def one(**changed: object) -> str:
    return FSDP1.format(**{**USUAL, "machines": 1, **changed})


@pytest.mark.parametrize(
    ("text", "meant", "noted"),
    [
        (one(), STAGE_3, ""),
        (one(strategy=1), STAGE_3, ""),
        (one(strategy="SHARD_GRAD_OP"), {"zero_optimization.stage": 2}, ""),
        (one(strategy=2, offload="true"), {"zero_optimization.offload_optimizer.device": "cpu"}, "the optimizer alone"),
        (one(offload="true"), {"zero_optimization.offload_param.device": "cpu", **STAGE_3}, ""),
        (one(state="FULL_STATE_DICT"), {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True}, ""),
        (one(strategy="HYBRID_SHARD", machines=2), {"zero_optimization.zero_hpz_partition_size": 4}, "second copy"),
        (one(strategy=4), {"zero_optimization.zero_hpz_partition_size": None, **STAGE_3}, ""),
        (one(strategy="NO_SHARD"), {"distributed_type": "MULTI_GPU", "zero_optimization.stage": None}, "plain DDP"),
        (one(checkpointing="true"), STAGE_3, "gradient_checkpointing_enable"),
        (FSDP2.format(after="true", policy="bf16"), {"mixed_precision": "bf16", **STAGE_3}, ""),
        (FSDP2.format(after="false", policy="null"), {"mixed_precision": "no", "zero_optimization.stage": 2}, ""),
        (one(strategy="HYBRID_SHARD_ZERO2", machines=2), {"zero_optimization.stage": 2}, "copies for each machine"),
        ("distributed_type: FSDP\nnum_processes: 8\n", STAGE_3, ""),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_mixed_precision_policy: bf16\n",
            {"mixed_precision": "bf16", **STAGE_3},
            "",
        ),
    ],
)
def test_an_fsdp_file_becomes_a_zero_file(text: str, meant: Mapping[str, Any], noted: str, tmp_path: Path) -> None:
    """A converted FSDP file passes the check, means the same, and keeps its other lines."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(text)
    fixed = fix_file(str(file))
    document = read_document(file, fixed.after.encode())
    assert not [problem for problem in find_problems(document) if problem.severity == "error"]
    read = {
        ".".join(path): entry.value
        for tree in (document.launch, document.deepspeed)
        for path, entry in tree.entries.items()
    }
    assert {key: read.get(key) for key in meant} == meant
    assert "fsdp" not in fixed.after
    assert ("# of the machine" in fixed.after) == ("# of the machine" in text)
    assert noted in " ".join(fixed.notes)
    file.write_text(fixed.after)
    assert not fix_file(str(file)).diff


def test_an_unknown_sharding_strategy_is_left_to_a_person(tmp_path: Path) -> None:
    """No stage is guessed; the check still names the file's problems."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(one(strategy="SHARD_MOST"))
    fixed = fix_file(str(file))
    assert "zero_stage" not in fixed.after
    assert "distributed_type: FSDP" in fixed.after
    assert "SHARD_MOST" in fixed.after
    assert any("SHARD_MOST" in note for note in fixed.notes)


@pytest.mark.skipif(not _PUBLISHED, reason="the published configuration files are not next to this checkout")
@pytest.mark.parametrize("file", _PUBLISHED, ids=lambda file: file.name)
def test_a_published_file_has_no_more_errors_than_before(file: Path, tmp_path: Path) -> None:
    """After a fix no problem asks to delete or rename a key, and a second fix changes nothing."""
    try:
        fixed = fix_file(str(file))
    except ConfigError:
        pytest.skip("the file cannot be read")
    copy = tmp_path / file.name
    copy.write_text(fixed.before)
    before = {problem.key for problem in find_problems(read_document(copy)) if problem.severity == "error"}
    copy.write_text(fixed.after)
    after = {problem.key for problem in find_problems(read_document(copy)) if problem.severity == "error"}
    assert after <= before
    assert not fix_file(str(copy)).diff
