"""`zero-plugin check` on files, folders and standard input, and each of its formats."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

Check = Callable[..., tuple[int, str, str]]
ZERO = "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
FILES = {
    "a.yaml": "mixed_precision: bf17\nnum_proceses: 2\n",
    "b.json": '{"zero_optimization": {"stage": 4}}',
    "fine.yaml": "num_processes: 2\n",
    "warns.json": '{"fp16": {"enabled": "true"}}',
}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Check) -> Check:
    """Run the command in a folder with FILES. Return exit code, standard output, and standard error."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    return lambda *arguments: run_command("check", *arguments)


def test_good_files_are_said_to_be_good(check: Check) -> None:
    """Good files give one line, whatever their number, and exit code 0."""
    Path("g.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert check("fine.yaml", "g.json") == (0, "2 files: no problem found\n", "")
    assert check("fine.yaml") == (0, "fine.yaml: no problem found\n", "")
    assert check("fine.yaml", "./fine.yaml", ".//fine.yaml", str(Path.cwd() / "fine.yaml")) == (
        0,
        "fine.yaml: no problem found\n",
        "",
    )


def test_memory_without_its_unit(check: Check) -> None:
    """A bare 24 means 24 bytes, which is a mistake and is reported. A plausible number of bytes is legal."""
    Path("m.yaml").write_text("gpu_memory: 24\nhost_memory: '512B'\n")
    code, out, _ = check("m.yaml")
    assert code == 2
    assert "gpu_memory: 24 is 24 bytes" in out
    assert 'host_memory: "512B" is 512 bytes' in out
    Path("m.yaml").write_text("gpu_memory: 25769803776\nhost_memory: 1MiB\n")
    assert check("m.yaml")[0] == 0


def test_problems_of_all_files_come_in_one_report(check: Check) -> None:
    """One report lists all files' problems: place, severity, key, value, reason, fix. The last line has counts."""
    code, out, _ = check("warns.json", "a.yaml", "fine.yaml", "b.json")
    assert code == 2
    assert out.splitlines() == [
        'warns.json:1:11: warning: fp16.enabled: read "true" as true',
        "    Write true.",
        'a.yaml:1:1: error: mixed_precision: "bf17" is not legal here',
        "    Did you mean bf16? Write no, fp16, bf16, auto or null.",
        "a.yaml:2:1: error: num_proceses = 2: unknown key",
        "    Did you mean num_processes?",
        "b.json:1:24: error: zero_optimization.stage: 4 is not legal here",
        "    Write an integer from 0 to 3 or auto (default 0).",
        "4 files: 3 errors, 1 warning",
    ]


def test_a_value_is_shown_unless_the_message_has_it(check: Check) -> None:
    """A value is printed unless the message contains it. A digit inside another number does not count."""
    Path("v.json").write_text('{"fp16": {"enabled": true, "loss_scale": 1024, "initial_scale_power": 4}}')
    assert "fp16.initial_scale_power = 4: has no effect: fp16.loss_scale is a fixed 1024" in check("v.json")[1]
    Path("v.json").write_text('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}')
    assert "error: train_batch_size: 10 is not a multiple" in check("v.json")[1]


def test_warnings_fail_only_when_strict(check: Check) -> None:
    """Warnings exit with 0, and with 1 under --strict. Errors exit with 2. Notes never fail."""
    assert check("warns.json")[0] == 0
    assert check("--strict", "warns.json")[0] == 1
    assert check("--strict", "b.json")[0] == 2
    Path("note.json").write_text('{"bfloat16": {"enabled": true}}')
    code, out, _ = check("--strict", "note.json")
    assert (code, out.splitlines()[-1]) == (0, "note.json: 1 note")


def test_what_a_run_without_zero_drops_is_a_warning(check: Check) -> None:
    """A file that configures ZeRO and requests a run without ZeRO is warned about the dropped settings."""
    Path("ddp.yaml").write_text(f"distributed_type: MULTI_CPU\n{ZERO}")
    Path("zero.yaml").write_text(f"distributed_type: DEEPSPEED\n{ZERO}")
    code, out, _ = check("ddp.yaml", "zero.yaml")
    assert code == 0
    assert out.splitlines()[0].startswith("ddp.yaml:1:1: warning: distributed_type = MULTI_CPU: ZeRO stage 2 and")
    assert out.splitlines()[-1] == "2 files: 1 warning"


def test_zero_beside_a_tpu_is_dropped_aloud(check: Check) -> None:
    """ZeRO settings for a TPU are dropped with a warning that says what a TPU does instead."""
    Path("tpu.yaml").write_text("distributed_type: TPU\ndeepspeed_config: {zero_stage: 3, offload_param_device: cpu}\n")
    code, out, _ = check("tpu.yaml")
    assert code == 0
    assert "ZeRO stage 3 and param offload to cpu dropped, as tpu.yaml:1:1 asks" in out
    assert "each TPU device holds the complete model, its gradients and optimizer states" in out


def test_what_launch_always_refuses_is_a_warning(check: Check) -> None:
    """A valid file that no machine can run gets a warning, not an error."""
    text = "deepspeed_config: {zero_optimization: {stage: 3, offload_param: {device: nvme, nvme_path: auto}}}\n"
    Path("c.yaml").write_text(text)
    code, out, _ = check("c.yaml")
    assert code == 0
    assert "warning: zero_optimization.offload_param.nvme_path: auto cannot know a folder" in out
    assert out.endswith("c.yaml: 1 warning\n")


def test_what_a_plan_fills_is_no_warning(check: Check) -> None:
    """An open stage or device gives no warning: the plan chooses it at launch or at prepare."""
    Path("c.yaml").write_text("deepspeed_config: {zero_stage: auto, offload_optimizer_device: auto}\n")
    assert check("c.yaml")[:2] == (0, "c.yaml: no problem found\n")


def test_batch_sizes_for_any_number_of_processes_are_no_warning(check: Check) -> None:
    """Batch sizes that depend on the number of processes give no warning. `launch` checks them."""
    Path("b.json").write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}'
    )
    assert check("b.json")[1] == "b.json: no problem found\n"


def test_a_json_that_a_yaml_names_is_reported_once(check: Check) -> None:
    """A JSON checked with its YAML and on its own has its problems reported once, under its name."""
    Path("c.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: b.json}\n")
    code, out, _ = check("c.yaml", "b.json")
    assert code == 2
    assert out.count("stage: 4 is not legal here") == 1
    assert out.splitlines()[-1] == "2 files: 1 error"


def test_a_folder_is_searched_for_configurations(check: Check) -> None:
    """A folder is searched recursively, also for broken and mistyped files. Unrelated files are listed as skipped."""
    for folder in ("sub/deep", ".hidden", "sub/node_modules", "env"):
        Path(folder).mkdir(parents=True)
        Path(folder, "bad.yaml").write_text("zero_optimisation: {stage: 2}\n")
    Path("env/pyvenv.cfg").touch()
    Path("sub/broken.json").write_text('{"zero_optimization": {"stage": 2')
    Path("package.json").write_text('{"name": "x", "version": "1.0", "scripts": {}}')
    Path("train.yml").write_text("model: gpt2\nlearning_rate: 1e-4\nbf16: true\ndeepspeed: ds.json\n")
    Path("list.json").write_text("[1, 2]")
    code, out, _ = check("--format", "json", ".")
    report = json.loads(out)
    assert code == 2
    assert report["files"] == [*FILES, "sub/broken.json", "sub/deep/bad.yaml"]
    assert report["skipped"] == ["list.json", "package.json", "train.yml"]
    assert "skipped, not configurations: list.json, package.json, train.yml" in check(".")[1]


def test_a_folder_without_configurations_is_an_error(check: Check, tmp_path: Path) -> None:
    """A folder without configurations is an error, because a check of nothing must not pass."""
    (tmp_path / "empty").mkdir()
    code, out, _ = check("empty")
    assert code == 2
    assert out.startswith("empty: error: no launch config and no DeepSpeed configuration below this folder")


def test_a_file_that_is_named_is_checked_whatever_it_looks_like(check: Check) -> None:
    """A named file is checked whatever its content, and a missing one is an error."""
    Path("package.json").write_text('{"name": "x"}')
    assert "package.json:1:2: error: name" in check("package.json")[1]
    assert "Did you mean fine.yaml?" in check("finee.yaml")[1]


def test_standard_input(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads standard input as a file without a name. A JSON that it names is searched in the working folder."""
    text = b"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: b.json\n  zero_stag: 2\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code, out, _ = check("-")
    assert code == 2
    assert "<standard input>:4:3: error: zero_stag = 2: unknown key" in out
    assert "b.json:1:24: error: zero_optimization.stage: 4" in out


def test_json_has_every_part(check: Check) -> None:
    """JSON output has the place as numbers, and key, value, message and fix as separate fields."""
    code, out, _ = check("--format", "json", "a.yaml")
    report = json.loads(out)
    assert code == 2
    assert report["summary"] == {"errors": 2, "warnings": 0, "notes": 0}
    assert report["problems"][0] == {
        "severity": "error",
        "file": "a.yaml",
        "line": 1,
        "column": 1,
        "key": "mixed_precision",
        "value": '"bf17"',
        "message": '"bf17" is not legal here',
        "fix": "Did you mean bf16? Write no, fp16, bf16, auto or null.",
    }


def test_github_annotations_are_escaped(check: Check) -> None:
    """Each problem is one workflow command. Percent signs and line ends are escaped, in properties `:` and `,` too."""
    Path("a,b.json").write_text('{"fp16": {"enabled": true}, "100%": 1}')
    out = check("--format", "github", "a,b.json", "warns.json")[1]
    unknown = '"100%25" = 1: unknown key%0ADelete it; a comment key starts with _.'
    assert out.splitlines() == [
        f'::error file=a%2Cb.json,line=1,col=29,title="100%25"::{unknown}',
        '::warning file=warns.json,line=1,col=11,title=fp16.enabled::fp16.enabled: read "true" as true%0AWrite true.',
        "2 files: 1 error, 1 warning",
    ]


def test_a_terminal_sees_the_line_and_a_mark_under_the_key(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is as long as the word. A long line is cut around the word."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # a terminal without colours
    Path("long.json").write_text(
        '{"bf16": {"enabled": true}, ' + " " * 200 + '"zero_stag": 2, "_": "' + "x" * 200 + '"}'
    )
    lines = check("a.yaml", "long.json")[1].splitlines()
    assert lines[:6] == [
        'error: mixed_precision: "bf17" is not legal here',
        " --> a.yaml:1:1",
        "  |",
        "1 | mixed_precision: bf17",
        "  | ^^^^^^^^^^^^^^^",
        "  = Did you mean bf16? Write no, fp16, bf16, auto or null.",
    ]
    cut, mark = lines[lines.index(" --> long.json:1:229") + 2 :][:2]
    assert len(cut) < 120
    assert cut[mark.index("^") : mark.rindex("^") + 1] == '"zero_stag"'


@pytest.mark.parametrize("words", [[], ["deepspeed"], ["yaml"]], ids=str)
def test_the_schemas_are_printed(check: Check, words: list[str]) -> None:
    """The schemas are printed as valid JSON Schemas, DeepSpeed's by default."""
    code, out, _ = check("--print_schema", *words)
    schema = json.loads(out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert (code, "zero_optimization" in schema["properties"]) == (0, words != ["yaml"])
    assert check("--print_schema", "nothing")[0] == 2


def test_nothing_to_check_is_a_usage_error(check: Check) -> None:
    """No file to check is a usage error, not an empty report."""
    code, _, err = check()
    assert (code, "FILE..." in err) == (2, True)


def test_nothing_slow_is_imported(check: Check) -> None:
    """The process that checks a file imports neither torch nor DeepSpeed nor NumPy."""
    code = (
        "import sys\nfrom zero_plugin.cli.main import main\n"
        "sys.argv = ['zero-plugin', 'check', 'fine.yaml']\n"
        "try: main()\nfinally: print([m for m in sys.modules if m in ('torch', 'deepspeed', 'numpy', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine.yaml: no problem found\n[]\n", done.stderr


def test_quiet_prints_only_problems(tmp_path: Path) -> None:
    """With --quiet a good file prints nothing, and a bad one prints the same as without --quiet."""
    command = [sys.executable, "-m", "zero_plugin", "check"]
    (tmp_path / "good.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stag": 2}}')

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run("-q", "good.json") == (0, "")
    assert run("--quiet", "bad.json") == run("bad.json")
    assert run("bad.json")[0] == 2
