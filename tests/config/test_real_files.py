"""Configurations that people publish: each is understood or refused by name, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, from_environment, to_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "configs"
FILES = sorted(path for path in FOLDER.glob("*/*") if path.suffix in (".json", ".yaml", ".yml"))


pytestmark = pytest.mark.skipif(not FILES, reason="the published configuration files are not beside this checkout")


def read_or_refusal(path: Path) -> Document | ConfigError:
    try:
        document = read_document(path)
        check_document(document)
    except ConfigError as error:
        return error
    return document


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_published_file(path: Path) -> None:
    """The file is accepted and hands over unchanged, or every problem is located in it with a way out."""
    read = read_or_refusal(path)
    if isinstance(read, ConfigError):
        assert all(p.where.startswith(str(path)) and p.fix for p in read.problems)
    else:
        launch_settings(read)
        assert from_environment({ENVIRONMENT_VARIABLE: to_environment(read)}) == read


def test_files_that_deepspeed_would_run_are_accepted() -> None:
    """Every file without a removed or foreign key, a template, FSDP or eight processes of a `NO` is accepted."""
    accepted = [path.parent.name for path in FILES if isinstance(read_or_refusal(path), Document)]
    assert (accepted.count("accelerate"), accepted.count("trl")) == (9, 8)
    assert accepted.count("deepspeed_examples") == 27
