"""`launch --model`: the plan is made before a worker starts, and passed on as values with their reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.amounts import require_count
from zero_plugin.config.document import Document, from_environment, to_environment
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, ModelFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec, plan_launch
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import Machine
from zero_plugin.plan.model_source import ModelSource

SERVER = Machine(gpus=8, cores=64)
OPEN = {"device": "auto"}
ZERO = {"stage": "auto", "offload_optimizer": OPEN, "offload_param": OPEN, "reduce_bucket_size": "auto"}
STAGE = ("zero_optimization", "stage")
MICRO = ("train_micro_batch_size_per_gpu",)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Describe a model of seven billion parameters by its config.json."""
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008}
    config |= {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan by formula, as without transformers: the trace of a large model takes seconds."""
    monkeypatch.setattr("zero_plugin.plan.model_source.ModelSource", lambda model: ModelSource(model, trace=False))


def asked(memory: str = "80GiB", micro_batch: Any = "auto", **zero: Any) -> Document:
    training = {"zero_optimization": {**ZERO, **zero}, "train_micro_batch_size_per_gpu": micro_batch}
    keys = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "gpu_memory": memory, "host_memory": "1TiB"}
    return document_from_mapping({**keys, "num_processes": 8, "deepspeed_config": training}, "run.yaml")


@pytest.mark.usefixtures("by_formula")
def test_the_workers_get_values_with_reasons(model: str) -> None:
    """Open fields have the plan's values in the document for the workers. The user's typed values are untouched."""
    document, said = plan_launch(asked(), model, 2048, gpus=8)
    handed = from_environment({"ZERO_PLUGIN_DOCUMENT": to_environment(document)})
    assert handed is not None
    stage = handed.deepspeed.get(*STAGE)
    assert stage is not None
    assert stage.value in (1, 2, 3)
    assert not stage.origin.typed_by_user
    assert "by the plan the fastest that fits" in stage.origin.reason
    assert any(line.startswith(f"zero_optimization.stage = {stage.value}: by the plan") for line in said)
    typed, _ = plan_launch(asked(stage=3), model, 2048, gpus=8)
    assert typed.deepspeed.entries[STAGE].origin.typed_by_user


@pytest.mark.usefixtures("by_formula")
def test_a_micro_batch_alone(model: str) -> None:
    """With a typed stage and an open micro-batch, the plan's holds until a loader brings its own."""
    document, said = plan_launch(
        asked(stage=3, offload_optimizer={"device": "cpu"}, offload_param={"device": "none"}), model, 512, gpus=0
    )
    micro = document.deepspeed.entries[MICRO]
    assert micro.value > 1
    assert "by the plan the largest that fits" in micro.origin.reason
    assert said
    machine = MachineFacts("cuda", 8, fp16=True)
    assert resolve(document, Facts(machine=machine)).tree.value(*MICRO) == micro.value
    loaded = resolve(document, Facts(LoopFacts(3, "the loader's"), machine))
    assert loaded.tree.value(*MICRO) == 3


@pytest.mark.usefixtures("by_formula")
def test_stated_memory_is_a_gpus(model: str) -> None:
    """A machine without a GPU plans like one with a GPU: fused optimizer, page-locked memory, the same reasons."""
    document = asked("24GiB")
    here, there = (plan_launch(document, model, 512, gpus=gpus)[0].deepspeed for gpus in (0, 8))
    assert here.value("zero_optimization", "offload_optimizer", "device") == "cpu"
    for path, entry in there.entries.items():
        assert (here.entries[path].value, here.entries[path].origin) == (entry.value, entry.origin)


@pytest.mark.usefixtures("by_formula")
def test_less_memory_shards_and_offloads_more(model: str) -> None:
    """Stated memory alone decides. If nothing fits, the launch ends before it starts anything."""

    def chosen(memory: str) -> tuple[Any, Any]:
        tree = plan_launch(asked(memory), model, 512, gpus=0)[0].deepspeed
        return tree.value(*STAGE), tree.value("zero_optimization", "offload_optimizer", "device")

    assert chosen("180GiB")[1] == chosen("34GiB")[1] == "none"
    assert chosen("180GiB")[0] < chosen("34GiB")[0] == 3
    assert chosen("16GiB") == (3, "cpu")
    with pytest.raises(ConfigError, match="nothing fits"):
        chosen("2GiB")


@pytest.mark.usefixtures("by_formula")
def test_a_loader_with_another_batch_size_wins(model: str) -> None:
    """A script may build its loader with the planned micro-batch. The loop's actual one counts."""
    document, _ = plan_launch(asked(), model, 2048, gpus=8)
    planned = document.deepspeed.value(*MICRO)
    assert planned >= 1
    machine = MachineFacts("cuda", 8, fp16=True)
    facts = Facts(LoopFacts(planned + 3, "the training DataLoader's batch_size"), machine, ModelFacts(4096, "", 1, 1))
    assert resolve(document, facts).tree.value(*MICRO) == planned + 3


@pytest.mark.usefixtures("by_formula")
def test_scripts_of_accelerate_get_the_chosen_stage(model: str) -> None:
    """With the plan made, the DeepSpeed JSON for these scripts has its stage. The batch stays the script's."""
    document, _ = plan_launch(asked(), model, 2048, gpus=8)
    spec = build_spec(document, Program(__file__), SERVER, {})
    assert spec.deepspeed_config is not None
    assert spec.deepspeed_config["zero_optimization"]["stage"] == document.deepspeed.value(*STAGE)
    assert spec.deepspeed_config["train_micro_batch_size_per_gpu"] == "auto"
    assert build_spec(asked(), Program(__file__), SERVER, {}).deepspeed_config is None


def test_nothing_to_plan_is_said(model: str) -> None:
    """--model without an open stage, device or micro-batch has no effect, which is logged."""
    settled = asked(micro_batch=2, stage=2, offload_optimizer={"device": "none"}, offload_param={"device": "none"})
    document, said = plan_launch(settled, model, 2048, gpus=8)
    assert document is settled
    assert said == [f"--model {model}: a plan has no open field to fill"]


def test_the_sequence_length_is_a_count() -> None:
    """The default is the model's own. Text is refused."""
    assert require_count("--sequence_length", None, "2048") is None
    assert require_count("--sequence_length", "4K", "2048") == 4000
    with pytest.raises(ConfigError, match=r"--sequence_length: 'long' is no count\n.*Write e\.g\. 2048\."):
        require_count("--sequence_length", "long", "2048")


def test_the_command_says_what_was_chosen(launch: Callable[..., Any], model: str, tmp_path: Path) -> None:
    """`launch --model … --dry_run` prints the plan's choices and the document that it would pass on."""
    file = tmp_path / "train.py"
    file.write_text("")
    config = Path(__file__).parents[2] / "ds_configs" / "auto.yaml"
    flags = ("--config_file", str(config), "--gpu_memory", "80GiB", "--host_memory", "1TiB", "--num_processes", "8")
    done = launch(*flags, "--model", model, "--sequence_length", "512", "--dry_run", str(file))
    assert done.returncode == 0, done.stderr
    assert "zero_optimization.stage = " in done.stderr
    assert "by the plan the fastest that fits" in done.stderr
    assert "by the plan the fastest that fits" in done.stdout
