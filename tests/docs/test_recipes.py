"""Each recipe's config and script train on a CPU as printed, with a tiny random model in the large model's folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, Block, blocks_of, commands_of

from zero_plugin.config.read import read_document
from zero_plugin.config.tree import AUTO, dotted

pytestmark = pytest.mark.programs

PROCESSES = 2  # instead of 8
LENGTH = 2048  # instead of 131,072 tokens
# What follows from the number of processes.
_SIZED = {"train_batch_size", "sequence_parallel_size"}


@dataclass(frozen=True)
class Recipe:
    """A page, and its run on a CPU.

    Attributes:
        page: name of the page.
        tokens: length of the text, for two optimizer steps.
        stage: ZeRO stage of the page's config; None without ZeRO.
        weights: the file that the script saves.
        traced: whether the plan traces the model, which takes a quarter of a minute.
    """

    page: str
    tokens: int
    stage: int | None
    weights: str = "tuned/model.safetensors"
    traced: bool = True

    @property
    def path(self) -> Path:
        """The page's file."""
        return ROOT / "docs/recipes" / f"{self.page}.md"

    def command(self, subcommand: str) -> tuple[list[str], str]:
        """Return the words of the page's `zero-plugin` command, and the output that the page shows."""
        typed = [pair for block in blocks_of(self.path) if block.types for pair in commands_of(block)]
        (found,) = [pair for pair in typed if pair[0].startswith(f"zero-plugin {subcommand} ")]
        return shlex.split(found[0]), found[1]

    def config(self) -> Block | None:
        """Return the config that the page shows, or None if its command names a ready one."""
        return next((block for block in blocks_of(self.path) if block.language == "yaml"), None)


RECIPES = [
    Recipe("lora", 2 * 4 * 4 * 2048, None, "adapters/adapter_model.safetensors"),
    Recipe("full-8b", 2 * PROCESSES * 2 * 8 * 2048, 2, traced=False),
    Recipe("offload-70b", 2 * PROCESSES * 16 * 2048, 3, traced=False),
    Recipe("long-samples", 2 * 8 * LENGTH, 2),
    Recipe("rl", 2 * PROCESSES * 8 * 128, 3, "policy/model.safetensors"),
]


def test_every_page_is_a_recipe_of_at_most_120_lines() -> None:
    """No page lacks a test, and each is short."""
    pages = sorted((ROOT / "docs/recipes").glob("*.md"))
    assert [page.stem for page in pages] == sorted(recipe.page for recipe in RECIPES)
    assert [page.stem for page in pages if len(page.read_text("utf-8").splitlines()) > 120] == []


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.page, marks=[pytest.mark.campaign] if recipe.traced else [])
        for recipe in RECIPES
        if recipe.config() is not None
    ],
)
def test_the_config_is_the_plans(recipe: Recipe, run_python: Callable[..., Any], tmp_path: Path) -> None:
    """The page's plan, typed as printed, writes the page's config."""
    config = recipe.config()
    assert config is not None
    assert config.file is not None
    _write_files(recipe, tmp_path)
    (tmp_path / config.file).unlink()
    (_, *words), _ = recipe.command("plan")
    done = run_python("-m", "zero_plugin", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = [line for line in (tmp_path / config.file).read_text().splitlines() if not line.startswith("#")]
    assert written == config.text.splitlines()


@pytest.mark.processes
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.page)
def test_it_trains(
    recipe: Recipe, run_launcher: Callable[..., Any], forked_workers: dict[str, str], built_ops: None, tmp_path: Path
) -> None:
    """The page's launch prints what the page shows, follows each value of its config, and changes the weights.

    Only the model, the text's length, and what depends on the number of processes are others.
    """
    for package in ("peft", "transformers"):
        pytest.importorskip(package, reason="pip install 'zero-plugin[transformers]'")
    _write_files(recipe, tmp_path)
    (_, *words), shown = recipe.command("launch")
    script = next(index for index, word in enumerate(words) if word.endswith(".py"))
    flags, arguments = words[1:script], words[script:]
    _write_inputs(recipe, tmp_path, arguments)
    arguments = [str(LENGTH) if word == "131072" else word for word in arguments]
    processes, flags = _on_few(recipe, flags, tmp_path)

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **forked_workers}
    command = [sys.executable, "-m", "zero_plugin", "launch", *flags, *arguments]
    done = run_launcher(command, seconds=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"on {processes} × cpu" in done.stderr
    for line in shown.split("…\n"):  # each begins a printed line, exactly
        assert f"\n{line}" in f"\n{done.stdout}"
    values = [float(value) for value in re.findall(r": (?:loss|reward) (\S+)", done.stdout)]
    assert len(values) == 2, done.stdout
    assert all(abs(value) < 10 for value in values)
    _assert_config_holds(recipe, tmp_path)
    _assert_trained(tmp_path / recipe.weights, tmp_path / arguments[1])


def _write_files(recipe: Recipe, folder: Path) -> None:
    """Write the files that the page shows, and the large models' configuration, which only the first page shows."""
    shown = next(block for block in blocks_of(RECIPES[0].path) if block.language == "json")
    for model in ("llama-3-8b", "llama-3.1-8b"):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(shown.text)
    for block in blocks_of(recipe.path):
        if block.file:
            (folder / block.file).write_text(block.text)


def _write_inputs(recipe: Recipe, folder: Path, arguments: list[str]) -> None:
    """Write tiny random models and a text under the names that the script's arguments have.

    At stage 3 the larger matrices are above the config's `stage3_param_persistence_threshold`, so they are partitioned.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    size = 256 if recipe.stage == 3 else 64
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        bos_token_id=256,
        eos_token_id=257,
        dtype="bfloat16",
        num_labels=1,
    )
    torch.manual_seed(0)
    for name in arguments[1:]:
        if name.endswith(".txt"):
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            text = b"".join(file.read_bytes() for file in files[:40])
            (folder / name).write_text(text.decode("ascii", "ignore")[: recipe.tokens])
        elif name.startswith("llama"):
            kind = AutoModelForSequenceClassification if "reward" in name else AutoModelForCausalLM
            kind.from_config(config).save_pretrained(folder / name)
            PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder / name)


def _on_few(recipe: Recipe, flags: list[str], folder: Path) -> tuple[int, list[str]]:
    """Return a number of processes, and flags that start it. The global batch of the config follows from it."""
    config = recipe.config()
    if config is None:
        return PROCESSES, [str(PROCESSES) if word == "8" else word for word in flags]
    if "num_processes: 1\n" in config.text:
        return 1, flags
    assert config.file is not None
    (folder / config.file).write_text(re.sub(r"(train_batch_size): \d+", r"\1: auto", config.text))
    sharing = ["--sequence_parallel_size", str(PROCESSES)] if "sequence_parallel_size" in config.text else []
    return PROCESSES, [*flags, "--num_processes", str(PROCESSES), *sharing]


def _assert_config_holds(recipe: Recipe, folder: Path) -> None:
    """Assert that the run's record has each value of the page's config, and the stage."""
    record = json.loads((folder / recipe.weights).with_name("resolved_config.json").read_text())
    values = {row["path"]: row["value"] for row in record["values"]}
    assert values.get("zero_optimization.stage") == recipe.stage
    if config := recipe.config():
        assert config.file is not None
        tree = read_document(str(folder / config.file)).deepspeed
        wanted = {dotted(path): tree.value(*path) for path in tree}
        wanted = {key: value for key, value in wanted.items() if value is not AUTO and key not in _SIZED}
        assert wanted
        assert {key: values.get(key) for key in wanted} == wanted


def _assert_trained(saved: Path, model: Path) -> None:
    """Assert that the saved weights are finite, and others than those of the model."""
    from safetensors.torch import load_file

    weights, before = load_file(saved), load_file(model / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    if saved.name.startswith("adapter"):
        assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)  # begin as zeros
    else:
        assert weights.keys() == before.keys()
        assert any(not tensor.equal(before[name]) for name, tensor in weights.items())
