"""Reading: both languages, both shapes, every form of the training part, and each value's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import Problem

Reader = Callable[[dict[str, str]], Document]

TUTORIAL_STAGE_2 = """{
    "fp16": {
        "enabled": "true",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                   "total_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": true
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Write files into an empty working directory and read the first, checked."""
    monkeypatch.chdir(tmp_path)

    def write_and_read(files: dict[str, str]) -> Document:
        for name, text in files.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        document = read_document(next(iter(files)))
        check_document(document)
        return document

    return write_and_read


def test_published_tutorial_config(read: Reader) -> None:
    """A widely copied stage-2 JSON is understood, with a note for its `"true"`. Every value has its place."""
    document = read({"ds.json": TUTORIAL_STAGE_2})
    assert document.deepspeed.value("fp16", "enabled") is True
    assert document.notes == (
        Problem("ds.json:3:9", "fp16.enabled", 'read "true" as true', "Write true.", '"true"', "warning"),
    )
    bucket = document.deepspeed.get("zero_optimization", "allgather_bucket_size")
    assert (bucket.value, type(bucket.value)) == (200_000_000, int)
    assert str(bucket.origin) == "ds.json:22:9"
    assert document.deepspeed.value("optimizer", "params", "lr") is AUTO
    assert document.deepspeed.value("optimizer", "params", "torch_adam") is True
    assert document.launch.entries == {}
    assert document.sources == ("ds.json",)
    assert document.sections["deepspeed", "zero_optimization"] == "ds.json:19:5"


def test_short_fields_stand_for_deepspeed_keys(read: Reader) -> None:
    """Accelerate's short fields become DeepSpeed's paths. Launch fields stay launch settings."""
    document = read(
        {
            "c.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
            "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /nvme\n  offload_param_device: cpu\n"
            "  offload_param_nvme_path: none\n  zero3_save_16bit_model: true\n  zero3_init_flag: true\n"
            "  gradient_accumulation_steps: 4\n  gradient_clipping: auto\n"
            "  deepspeed_moe_layer_cls_names: A, B\n  deepspeed_hostfile: hosts\n  deepspeed_multinode_launcher: pdsh\n"
        }
    )
    assert document.deepspeed.nested() == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": AUTO,
    }
    assert document.launch.value("deepspeed_hostfile") == "hosts"
    assert document.launch.value("zero3_init_flag") is True
    assert document.deepspeed.get("zero_optimization", "stage").origin.where == "c.yaml:4:3"


def test_file_inline_and_short_fields_mix(read: Reader) -> None:
    """A named file, inline DeepSpeed keys and short fields combine. Equal values agree; a value replaces `auto`."""
    document = read(
        {
            "conf/c.yaml": "deepspeed_config:\n  deepspeed_config_file: ds.json\n  zero_stage: 2\n"
            "  gradient_clipping: 1\n  bf16: {enabled: true}\n  gradient_accumulation_steps: 8\n",
            "conf/ds.json": '{"zero_optimization": {"stage": "2", "overlap_comm": false}, "gradient_clipping": 1.0,'
            ' "gradient_accumulation_steps": "auto"}',
        }
    )
    assert document.deepspeed.nested() == {
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
    }
    assert document.sources == ("conf/c.yaml", "conf/ds.json")


def test_the_named_file_is_beside_the_config_or_in_the_working_directory(read: Reader) -> None:
    """The YAML's folder comes first. If the working directory has a file of that name, a note says which was read."""
    yaml = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert read({"a/c.yaml": yaml, "ds.json": '{"steps_per_print": 1}'}).deepspeed.value("steps_per_print") == 1
    both = read({"a/c.yaml": yaml, "ds.json": '{"steps_per_print": 1}', "a/ds.json": '{"steps_per_print": 2}'})
    assert both.deepspeed.value("steps_per_print") == 2
    (note,) = both.notes
    assert note.headline == "a/c.yaml:2:3: deepspeed_config_file: read a/ds.json, not ds.json"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.yaml", "zero_optimization:\n  stage: 3\n  sub_group_size: 2e8\n"),
        ("ds.yaml", '{\n\t"zero_optimization": {"stage": 3, "sub_group_size": 200000000.0}\n}'),
        ("ds.yaml", "{zero_optimization: {stage: 3, sub_group_size: 2e+8}}"),
        ("ds.json", '// why\n{"zero_optimization": {"stage": 3, # how\n "sub_group_size": "2e8",}, /* end */ }'),
        ("ds.json", "zero_optimization:\n  stage: 3\n  sub_group_size: 0xBEBC200\n"),
        ("ds.conf", '\ufeff{"zero_optimization":\r\n {"stage": 3, "sub_group_size": 200000000}}'),
        ("c.json", '{"deepspeed_config": {"zero_stage": 3, "zero_optimization": {"sub_group_size": 2e8}}}'),
        ("c.yaml", "deepspeed_config:\n  zero_stage: 3\n  zero_optimization: {_why: x, sub_group_size: 200000000}\n"),
        ("c.yaml", "_base: &b {stage: 1, sub_group_size: 200000000}\nzero_optimization: {<<: *b, stage: 3}\n"),
    ],
)
def test_content_tells_the_language_and_the_shape(read: Reader, name: str, text: str) -> None:
    """A DeepSpeed config as YAML, a launch config as JSON, comments, BOM, CRLF and merges all read the same."""
    zero = read({name: text}).deepspeed.section("zero_optimization").nested()
    assert zero == {"stage": 3, "sub_group_size": 200_000_000}
    assert isinstance(zero["sub_group_size"], int)


def test_yaml_scalars_are_those_of_yaml_1_2(read: Reader) -> None:
    """Exponents are numbers. `no`, `on`, `1:30` and quoted text are text until a key requires a boolean."""
    document = read(
        {
            "c.yaml": "mixed_precision: no\ndowncast_bf16: 'no'\nuse_cpu: yes\nmain_process_ip: 1:30\n"
            "log_dir: '5'\ndeepspeed_config:\n  optimizer: {type: adamw, params: {lr: 5e-5, eps: .1E-7}}\n"
        }
    )
    assert document.launch.value("mixed_precision") == "no"
    assert document.launch.value("main_process_ip") == "1:30"
    assert document.launch.value("use_cpu") is True
    assert [note.headline for note in document.notes] == ['c.yaml:3:1: use_cpu: read "yes" as true']
    assert document.deepspeed.section("optimizer").nested() == {"type": "AdamW", "params": {"lr": 5e-5, "eps": 1e-8}}


def test_a_type_in_any_case_opens_its_parameters(read: Reader) -> None:
    """Numbers written as text are read for an optimizer whose type is in lower case, too."""
    document = read({"ds.json": '{"optimizer": {"type": "adamw", "params": {"lr": "1e-3"}}}'})
    optimizer = document.deepspeed.section("optimizer")
    assert optimizer.nested() == {"type": "AdamW", "params": {"lr": 1e-3}}


def test_other_spellings_become_one(read: Reader) -> None:
    """Other names that DeepSpeed accepts become the standard key, with a note."""
    document = read(
        {
            "ds.json": '{"bfloat16": {"enabled": true}, "zero_optimization": {"stage": 3, "cpu_offload": true,'
            ' "prefetch_bucket_size": 7, "stage3_gather_fp16_weights_on_model_save": true}}'
        }
    )
    assert document.deepspeed.nested() == {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_prefetch_bucket_size": 7,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert [note.severity for note in document.notes] == ["note", "warning", "note", "warning"]


def test_a_deepspeed_run_without_a_stage_gets_accelerates(read: Reader) -> None:
    """`distributed_type: DEEPSPEED` alone means stage 2, as a default that any layer may change."""
    entry = read({"c.yaml": "distributed_type: DEEPSPEED\n"}).deepspeed.get("zero_optimization", "stage")
    assert (entry.value, entry.origin.kind) == (2, "default")
    assert not read({"c.yaml": "distributed_type: MULTI_GPU\n"}).deepspeed.has_section("zero_optimization")


def test_a_dict_in_code_reads_like_a_file() -> None:
    """A dict has either shape, takes paths, NumPy-like numbers and tuples, and has the call as its origin."""
    document = document_from_mapping(
        {"num_processes": 2, "deepspeed_config": {"zero_stage": 3, "offload_param_nvme_path": Path("/n")}},
        "Accelerator(config=…)",
    )
    assert document.deepspeed.value("zero_optimization", "offload_param", "nvme_path") == "/n"
    origin = document.deepspeed.get("zero_optimization", "stage").origin
    assert (origin.kind, origin.where) == ("code", "Accelerator(config=…)")
    bare = document_from_mapping({"optimizer": {"type": "Adam", "params": {"betas": (0.9, 0.99)}}}, "prepare")
    assert bare.deepspeed.value("optimizer", "params", "betas") == (0.9, 0.99)


@pytest.mark.parametrize(
    ("above", "wanted"),
    [
        (None, {"offload_optimizer": {"device": "cpu"}}),
        ({}, {"offload_optimizer": {"device": "cpu"}}),
        ("cpu", {"offload_optimizer": "cpu", "cpu_offload": True}),
    ],
)
def test_an_old_key_beside_the_section_that_it_belongs_to(above: object, wanted: dict[str, object]) -> None:
    """If the section is null or absent, the old key fills it. Any other value is left to the check."""
    zero = {"offload_optimizer": above, "cpu_offload": True}
    document = document_from_mapping({"deepspeed_config": {"zero_optimization": zero}}, "Accelerator(config=…)")
    assert document.deepspeed.nested() == {"zero_optimization": wanted}
