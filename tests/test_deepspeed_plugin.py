"""A DeepSpeed configuration in code: fields and files combined, shown as a dict that a script may change."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.document import Document
from zero_plugin.config.plugins import ONLY, Configurations, DeepSpeedPlugin, HfDeepSpeedConfig
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError

ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}


def configurations(found: Document | None = None, **plugins: DeepSpeedPlugin) -> Configurations:
    """Return the documents of a run whose code passes `plugins`."""
    return Configurations(found or Document(), plugins, lambda document: document)


def test_fields_arrive() -> None:
    """Every field is in the configuration under DeepSpeed's name, including NVMe paths."""
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        gradient_accumulation_steps=4,
        gradient_clipping=0.5,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/fast/1",
        offload_param_device="nvme",
        offload_param_nvme_path="/fast/2",
        zero3_save_16bit_model=True,
        zero3_init_flag=False,
        transformer_moe_cls_names="Experts, OtherExperts",
    )
    document = configurations(plugin=plugin).document
    assert document.to_deepspeed() == {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast/1"},
            "offload_param": {"device": "nvme", "nvme_path": "/fast/2"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert document.launch.value("distributed_type") == "DEEPSPEED"
    assert document.launch.value("zero3_init_flag") is False
    assert document.launch.value("deepspeed_moe_layer_cls_names") == "Experts, OtherExperts"
    assert (plugin.zero_stage, plugin.offload_param_nvme_path, plugin.zero3_init_flag) == (3, "/fast/2", False)
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()


def test_what_is_not_said() -> None:
    """The stage is Accelerate's 2, with its reason. Open fields show as `auto`, and the launcher fills them."""
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.gradient_accumulation_steps) == (
        2,
        "none",
        "auto",
    )
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    launched = read_text("zero_optimization: {stage: 3}\ngradient_clipping: 2.0")
    followed = configurations(launched, plugin=plugin)
    assert followed.document.deepspeed.value("zero_optimization", "stage") == 3
    assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 2.0)


@pytest.mark.parametrize("form", ["dict", "path", "text", "base64", "HfDeepSpeedConfig"])
def test_whole_configurations(form: str, tmp_path: Path) -> None:
    """A dict, a file, its text, and the object that Accelerate makes of them all work."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO2))
    given: Any = {
        "dict": ZERO2,
        "path": str(path),
        "text": json.dumps(ZERO2),
        "base64": base64.urlsafe_b64encode(json.dumps(ZERO2).encode()).decode(),
        "HfDeepSpeedConfig": HfDeepSpeedConfig(path),
    }[form]
    plugin = DeepSpeedPlugin(given, gradient_clipping=1.5)
    config = configurations(plugin=plugin).document.to_deepspeed()
    assert config == {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.5}
    assert ZERO2["gradient_clipping"] == "auto"


def test_contradictions_name_both(tmp_path: Path) -> None:
    """A field contradicts its file, and a plugin contradicts the launcher."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO2))
    with pytest.raises(ConfigError, match=r"3 here, but 2 at .*ds\.json:1"):
        DeepSpeedPlugin(str(path), zero_stage=3)
    launched = read_text("zero_optimization: {stage: 3}")
    with pytest.raises(ConfigError, match=r"2 in code, but 3 at launch\.yaml:2"):
        configurations(launched, plugin=DeepSpeedPlugin(zero_stage=2))
    with pytest.raises(ConfigError, match=r"no_such\.json"):
        DeepSpeedPlugin("no_such.json")
    with pytest.raises(ConfigError, match="no configuration"):
        DeepSpeedPlugin(3)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offload_of_parameters_that_a_stage_has_not_is_told(device: str) -> None:
    """It is logged for code, where Accelerate ignores it. With stage 3, or in a file, it is unchanged."""
    path = {"offload_param_nvme_path": "/nvme"} if device == "nvme" else {}
    plugin = DeepSpeedPlugin(zero_stage=2, offload_param_device=device, **path)
    run = configurations(plugin=plugin)
    (note,) = [note for note in run.document.notes if note.severity == "warning"]
    assert note.headline == (
        f"DeepSpeedPlugin(…): offload_param_device: {device} has no effect: stage 2 does not partition parameters"
    )
    assert plugin.offload_param_device == "none"
    assert "offload_param" not in plugin.deepspeed_config["zero_optimization"]
    assert DeepSpeedPlugin(zero_stage=3, offload_param_device=device, **path).offload_param_device == device
    with pytest.raises(ConfigError, match="needs ZeRO stage 3"):
        configurations(read_text("zero_optimization: {stage: 2, offload_param: {device: cpu}}"))


def test_what_has_no_meaning_is_refused() -> None:
    """One error names MS-AMP and a batch size that differs from the training loader's."""
    with pytest.raises(ConfigError) as caught:
        DeepSpeedPlugin(enable_msamp=True, is_train_batch_min=False)
    assert len(caught.value.problems) == 2


def test_edits_are_followed() -> None:
    """A script's changes to the dict count from the next prepare on, with code as their origin."""
    plugin = DeepSpeedPlugin(zero_stage=2)
    plugin.deepspeed_config["gradient_clipping"] = 1.0
    run = configurations(plugin=plugin)
    assert run.document.deepspeed.value("gradient_clipping") == 1.0
    config = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = 8
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["gradient_clipping"] = 2.0  # code corrects what code wrote
    document = run.follow_edits()
    assert document.deepspeed.value("train_micro_batch_size_per_gpu") == 8
    assert document.deepspeed.value("zero_optimization", "offload_optimizer", "device") == "cpu"
    assert document.deepspeed.value("gradient_clipping") == 2.0
    entry = document.deepspeed.get("train_micro_batch_size_per_gpu")
    assert entry is not None
    assert entry.origin.where == "deepspeed_config['train_micro_batch_size_per_gpu']"
    assert plugin.deepspeed_config is config
    assert plugin.offload_optimizer_device == "cpu"
    assert run.follow_edits() is document
    del config["zero_optimization"]["offload_optimizer"]
    assert not run.follow_edits().deepspeed.has_section("zero_optimization", "offload_optimizer")


def test_edits_do_not_overrule_the_file() -> None:
    """An edit or a deletion that contradicts a file's explicit value is an error. An edit fills an open value."""
    run = configurations(read_text("train_batch_size: auto\nzero_optimization: {stage: 2}\ngradient_clipping: 1.0"))
    assert run.plugin is not None
    run.plugin.deepspeed_config["train_batch_size"] = 64
    assert run.follow_edits().deepspeed.value("train_batch_size") == 64
    run.plugin.deepspeed_config["gradient_clipping"] = 3.0
    with pytest.raises(ConfigError, match=r"3.*in code, but 1.* at launch\.yaml:4"):
        run.follow_edits()
    del run.plugin.deepspeed_config["gradient_clipping"]
    with pytest.raises(ConfigError, match=r"deleted in code, but 1.* at launch\.yaml:4"):
        run.follow_edits()


def test_filled_values_are_shown_and_stay_open() -> None:
    """After prepare the dict shows the resolved values.

    These are no edits, and the next prepare resolves them again.
    """
    run = configurations(plugin=DeepSpeedPlugin(zero_stage=1))
    assert run.plugin is not None
    before = run.document
    run.show({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "reduce_bucket_size": 500}})
    assert run.plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 4
    assert run.follow_edits() is before


def test_several_plugins() -> None:
    """The first is selected. Another one counts once selected. Each keeps its own document."""
    student, teacher = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
    run = configurations(student=student, teacher=teacher)
    assert (run.plugin, student.selected, teacher.selected) == (student, True, False)
    student._unselect()
    teacher.select(_from_accelerator_state=True)
    assert run.document.deepspeed.value("zero_optimization", "stage") == 3
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        student.select()


def test_a_run_without_deepspeed_has_no_plugin() -> None:
    """Only ZeRO has a view. If a file requests ZeRO, the view exists."""
    assert configurations().plugin is None
    assert configurations(read_text("mixed_precision: bf16")).plugin is None
    asked = configurations(read_text("distributed_type: DEEPSPEED"))
    assert list(asked.plugins) == [ONLY]


def test_questions_to_a_configuration() -> None:
    """Dotted keys work, absent or not."""
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {}})
    assert config.get_value("zero_optimization.stage") == 3
    assert config.get_value("zero_optimization.missing.key", 7) == 7
    assert config.find_config_node("bf16.enabled") == (None, "enabled")
    assert config.is_zero3()
    assert not config.is_zero2()
    assert config.is_offload()
    assert not config.is_true("fp16.enabled")
    assert not config.is_false("fp16.enabled")
    config.config["fp16"]["enabled"] = False
    assert config.is_false("fp16.enabled")
    config.del_config_sub_tree("zero_optimization.offload_param")
    config.del_config_sub_tree("no.such.key")
    assert not config.is_offload()
    with pytest.raises(ValueError, match="no_such"):
        config.del_config_sub_tree("no_such", must_exist=True)


def read_text(text: str) -> Document:
    """Write a launch YAML with these keys, or with this training part below `deepspeed_config`, from line 2 on."""
    if not text.startswith(("mixed_precision", "distributed_type")):
        text = "deepspeed_config:\n" + "\n".join(f"  {line}" for line in text.split("\n"))
    return read_document("launch.yaml", content=text.encode())
