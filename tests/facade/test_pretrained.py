"""`from_pretrained` of a complete model in each process, on a machine that cannot hold all copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from zero_plugin.errors import MachineError
from zero_plugin.loop.memory_check import checking_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model folder."""
    made = tmp_path_factory.mktemp("model")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(made)
    return made


def stored(folder: Path) -> int:
    return sum(p.numel() * 4 for p in transformers.GPT2LMHeadModel.from_pretrained(folder).parameters())


@pytest.mark.parametrize("asked", [{}, {"dtype": torch.bfloat16}, {"dtype": "float16"}], ids=str)
def test_it_is_refused_by_the_bytes_of_its_type(folder: Path, asked: dict[str, Any]) -> None:
    """Three processes load if memory holds three copies in the dtype. With one byte less none does."""
    size = 3 * stored(folder) // (2 if asked else 1)
    with checking_pretrained(3, size):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **asked)
    with checking_pretrained(3, size - 1), pytest.raises(MachineError, match="in each of 3 processes"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **asked)
    transformers.AutoModelForCausalLM.from_pretrained(folder, **asked)


def test_what_cannot_be_told_is_not_refused(folder: Path) -> None:
    """A model for another device than the CPU, or without local files, is left to transformers."""
    with checking_pretrained(3, 0):
        transformers.GPT2LMHeadModel.from_pretrained(folder, device_map={"": "cpu"})
        with pytest.raises(OSError, match="cached files"):
            transformers.GPT2LMHeadModel.from_pretrained("nowhere/at-all", local_files_only=True)


def test_runs_that_end_in_any_order(folder: Path) -> None:
    """The newest active run counts. After the last run, transformers' own method is restored."""
    own = transformers.PreTrainedModel.__dict__["from_pretrained"]
    first, second = checking_pretrained(3, 2**60), checking_pretrained(3, 0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(MachineError):
        transformers.GPT2LMHeadModel.from_pretrained(folder)
    second.__exit__(None, None, None)
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is own
