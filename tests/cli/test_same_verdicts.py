"""For generated documents, `explain`, `launch --dry_run` and `Accelerator(config=…)` agree with `check`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from zero_plugin import Accelerator
from zero_plugin.config.check import find_problems
from zero_plugin.config.document import Document
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.errors import ConfigError, ZeroPluginError
from zero_plugin.machine.hardware import has_gpu_driver

sys.path.insert(0, str(Path(__file__).parents[1] / "config"))
from deepspeed_documents import TRIES, Config, documents

Command = Callable[..., tuple[int, str]]
WHERE = "Accelerator(config=…)"


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> Command:
    """Run a command of zero-plugin in this process. Return its exit code and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("print(1)\n")

    def run(*arguments: str) -> tuple[int, str]:
        code, _, errors = run_command(*arguments)
        return code, errors

    return run


def refusals(read: Callable[[], Document]) -> list[str]:
    """Return the problems that `check` finds in a document."""
    try:
        found = find_problems(read())
    except ConfigError as error:
        found = list(error.problems)
    return [problem.finding for problem in found if problem.severity == "error"]


def construct(config: Config, refused: list[str]) -> str:
    """Return the result of `Accelerator(config=…)`, which must refuse all that is in `refused`."""
    said = ""
    try:
        Accelerator(config=config, cpu=True).end_training()
    except ZeroPluginError as error:
        said = str(error)
    assert bool(said) >= bool(refused), config
    assert [finding for finding in refused if finding not in said] == [], (config, said)
    return "refuses it" if said else "is made"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tries", [20, TRIES[1]])
def test_commands_and_the_accelerator_say_the_same(tries: int, command: Command) -> None:
    """All of them refuse what the check refuses, with all of its problems.

    What this machine cannot do is an error with its place, never a traceback. Without a device, `explain` refuses
    nothing because of this machine.
    """
    device = "cuda" if has_gpu_driver() else "cpu"
    counts: Counter[str] = Counter()
    for config in documents(tries):
        Path("ds.json").write_text(json.dumps(config))
        refused = refusals(partial(read_document, "ds.json"))
        in_code = refusals(partial(document_from_mapping, config, WHERE))
        placeless = [re.sub(r"ds\.json:\d+:\d+", WHERE, finding) for finding in refused]
        assert sorted(placeless) == sorted(in_code), config
        verdict, codes = "refused by the check" if refused else "accepted by the check", set()
        elsewhere, _ = command("explain", "ds.json")
        for arguments in (
            ("explain", "ds.json", "--accelerator", device),
            ("launch", "--config_file", "ds.json", "--dry_run", "train.py"),
        ):
            code, said = command(*arguments)
            located = re.search(r"^ *ds\.json(:\d+:\d+)?: ", said, re.MULTILINE)
            assert code == 0 or (code == 2 and located), (config, code, said)
            assert [finding for finding in refused if finding not in said] == [], (config, said)
            codes.add(code)
        assert len(codes) == 1, config
        assert elsewhere <= max(codes), config
        counts[f"{verdict}: explain and launch --dry_run end with {codes.pop()}"] += 1
        counts[f"{verdict}: {WHERE} {construct(config, in_code)}"] += 1
    print("\n".join(f"{count:5} {what}" for what, count in sorted(counts.items())))
