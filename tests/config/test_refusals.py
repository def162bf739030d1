"""Wrong configurations, one fault each: the exact place and the key part of the message."""

# ruff: noqa: E501 - a case is a line, so that the table can be read as one

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.errors import ConfigError

ZERO3 = '"zero_optimization": {"stage": 3, '
ZERO2 = '"zero_optimization": {"stage": 2, '
YAML = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"

# (what is wrong, file, its text, where, part of "key: message fix")
WRONG = [
    # --- the file itself
    ("empty yaml", "c.yaml", "", "c.yaml:1:1", "the file is empty"),
    ("empty json", "c.json", " \n", "c.json:1:1", "the file is empty"),
    ("comments only", "c.yaml", "# nothing\n\n", "c.yaml:1:1", "the file is empty"),
    ("a list at the top", "c.yaml", "- zero_stage: 2\n", "c.yaml:1:1", "holds a list, not keys"),
    ("a JSON list at the top", "c.json", "[1, 2]", "c.json:1:1", "holds a list, not keys"),
    ("a single word", "c.yaml", "zero2\n", "c.yaml:1:1", "holds a single value"),
    ("broken text encoding", "c.json", b'{"a": "\xff"}', "c.json", "not UTF-8 text: byte 0xff at position 7"),
    ("UTF-16", "c.json", '{"a": 1}'.encode("utf-16"), "c.json", "not UTF-8 text"),
    ("too large", "c.json", " " * (1 << 20) + " {}", "c.json", "is larger than 1048576 bytes"),
    # --- YAML syntax
    ("a tab as indentation", "c.yaml", "deepspeed_config:\n\tzero_stage: 2\n", "c.yaml:2:1", "YAML does not allow tabs"),
    ("a missing colon", "c.yaml", "num_processes 2\nmixed_precision: bf16\n", "c.yaml:2:16", "`key: value` on a line"),
    ("open bracket", "c.yaml", "gpu_ids: [0, 1\nuse_cpu: true\n", "c.yaml:2:8", "not YAML"),
    ("a duplicate key", "c.yaml", "num_processes: 2\nnum_processes: 4\n", "c.yaml:2:1", "the first is at c.yaml:1:1"),
    ("a duplicate key below", "c.yaml", YAML + "  zero_stage: 2\n  zero_stage: 2\n", "c.yaml:5:3", "written twice"),
    ("two documents", "c.yaml", "num_processes: 2\n---\nnum_processes: 4\n", "c.yaml:2:1", "a second YAML document"),
    ("a tag", "c.yaml", "num_processes: !!python/object:os.system 2\n", "c.yaml:1:16", "is not understood"),
    ("an undefined alias", "c.yaml", "num_processes: *n\n", "c.yaml:1:16", "*n has no anchor before it"),
    ("an alias to itself", "c.yaml", "deepspeed_config: &a\n  fp16: *a\n", "c.yaml:2:9", "*a has no anchor before it"),
    ("a list as key", "c.yaml", "[a, b]: 1\n", "c.yaml:1:1", "a key must be plain text"),
    ("a control character", "c.yaml", "num_processes: 2\x00\n", "c.yaml", "a character that YAML forbids: U+0000"),
    (
        "aliases of aliases",
        "c.yaml",
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        "c.yaml:5:10",
        "holds more than 2000 values",
    ),
    ("deep YAML", "c.yaml", "num_processes: " + "[" * 5000, "c.yaml:1:66", "nested deeper than 50 levels"),
    # --- JSON syntax
    ("an open brace", "c.json", '{"train_batch_size": 8', "c.json:1:23", "the end of the file where `,` or `}` must stand"),
    ("a missing comma", "c.json", '{\n "a": 1\n "b": 2\n}', "c.json:3:2", "where `,` or `}` must stand"),
    ("single quotes", "c.json", "{'fp16': 1}", "c.json:1:2", "`'` where a key must stand"),
    ("a bare key", "c.json", '{"fp16": {enabled: true}}', "c.json:1:11", "`enabled` where a key must stand"),
    ("a Python literal", "c.json", '{"fp16": {"enabled": True}}', "c.json:1:22", "Write true, as JSON spells it"),
    ("a template", "c.json", '{"train_batch_size": ${bs}}', "c.json:1:22", "`${bs}` where a value must stand"),
    ("a string without an end", "c.json", '{"a": "b\n}', "c.json:1:9", "a broken string"),
    ("no colon", "c.json", '{"fp16" true}', "c.json:1:9", 'a colon is missing after "fp16"'),
    ("two objects", "c.json", "{}\n{}", "c.json:2:1", "text after the end of the JSON"),
    ("not a number", "c.json", '{"gradient_clipping": NaN}', "c.json:1:23", "NaN is not a number that a setting can hold"),
    ("a JSON duplicate", "c.json", '{"fp16": {},\n"fp16": {}}', "c.json:2:1", "written twice"),
    ("an endless number", "c.json", '{"gradient_clipping": 1e999}', "c.json:1:23", "1e999 is not a number"),
    ("an endless integer", "c.json", '{"train_batch_size": ' + "9" * 5000 + "}", "c.json:1:22", "is not a number"),
    ("no number in YAML", "c.yaml", YAML + "  gradient_clipping: .nan\n", "c.yaml:4:3", '".nan" is not legal here'),
    ("too many values", "c.json", "{" + ",".join(f'"k{n}": 1' for n in range(9000)) + "}", "c.json:1:20890", "holds more than 2000"),
    ("deep JSON", "c.json", '{"fp16":' * 5000, "c.json:1:409", "nested deeper than 50 levels"),
    # --- unknown keys
    ("typo at the top of a JSON", "c.json", '{"zero_optimisation": {"stage": 2}}', "c.json:1:2", "Did you mean zero_optimization?"),
    ("typo in a section", "c.json", '{"zero_optimization": {"stge": 2}}', "c.json:1:24", "Did you mean stage?"),
    ("typo two levels down", "c.json", "{" + ZERO3 + '"offload_param": {"devise": "cpu"}}}', "c.json:1:54", "Did you mean device?"),
    ("a misplaced key", "c.json", '{"offload_optimizer": {"device": "cpu"}}', "c.json:1:2", "It belongs in zero_optimization."),
    ("an unread hand-parsed key", "c.json", '{"aio": {"queue_dept": 8}}', "c.json:1:10", "Did you mean queue_depth?"),
    ("an unknown parameter", "c.json", '{"optimizer": {"type": "adamw", "params": {"betta": [0.9, 0.99]}}}', "c.json:1:44", "optimizer.params.betta: unknown key Did you mean betas?"),
    ("a key of another schedule", "c.json", '{"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}', "c.json:1:47", "a scheduler.type that has it: WarmupDecayLR, WarmupCosineLR"),
    ("a launch key in a JSON", "c.json", '{"fp16": {}, "bf16": {}, "mixed_precision": "bf16"}', "c.json:1:26", "top level of the launch YAML"),
    ("a short field in a JSON", "c.json", '{"fp16": {}, "zero_stage": 2}', "c.json:1:14", "Write zero_optimization.stage here"),
    ("typo in a launch key", "c.yaml", "num_procesess: 2\nuse_cpu: true\n", "c.yaml:1:1", "Did you mean num_processes?"),
    ("a short field at the top", "c.yaml", "num_processes: 2\nzero_stage: 2\n", "c.yaml:2:1", "below deepspeed_config"),
    ("typo in a short field", "c.yaml", YAML + "  zero_stag: 2\n", "c.yaml:4:3", "Did you mean zero_stage?"),
    ("typo of the section", "c.yaml", "num_processes: 2\ndeepspeed_confg:\n  zero_stage: 2\n", "c.yaml:2:1", "Did you mean deepspeed_config?"),
    # --- retired keys
    ("a removed section", "c.json", '{"amp": {"enabled": false}}', "c.json:1:2", "removed in DeepSpeed 0.19.8, even when disabled"),
    ("a renamed key", "c.json", '{"aio": {"thread_count": 2}}', "c.json:1:10", "Write intra_op_parallelism"),
    ("a removed zero key", "c.json", "{" + ZERO3 + '"mics_shard_size": 8}}', "c.json:1:36", "removed in DeepSpeed 0.19.7"),
    ("legacy stage 1", "c.json", "{" + ZERO2 + '"legacy_stage1": true}}', "c.json:1:36", "legacy_stage1: true is not legal here Write false"),
    ("two spellings at once", "c.json", '{"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}}', "c.json:1:24", "keep offload_optimizer"),
    ("a removed optimizer", "c.json", '{"optimizer": {"type": "OneBitAdam"}}', "c.json:1:16", "removed it by 0.19.7"),
    ("max_grad_norm", "c.json", '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}', "c.json:1:44", "write gradient_clipping"),
    # --- values
    ("an offload without a stage", "c.yaml", YAML + "  offload_param_device: cpu\n", "c.yaml:4:3", "the stage is 2 where none is written"),
    ("stage 4", "c.yaml", YAML + "  zero_stage: 4\n", "c.yaml:4:3", "4 is not legal here Write an integer from 0 to 3 or auto"),
    ("stage as words", "c.json", '{"zero_optimization": {"stage": "zero2"}}', "c.json:1:24", '"zero2" is not legal here'),
    ("a device that is none", "c.yaml", YAML + "  offload_optimizer_device: gpu\n", "c.yaml:4:3", "none, cpu, nvme or auto"),
    ("a fraction of an integer", "c.json", "{" + ZERO3 + '"stage3_prefetch_bucket_size": 15099494.4}}', "c.json:1:36", "15099494.4 is not legal here Write an integer"),
    ("a negative norm", "c.yaml", YAML + "  gradient_clipping: -1\n", "c.yaml:4:3", "a number of at least 0"),
    ("a batch of zero", "c.json", '{"train_batch_size": 0}', "c.json:1:2", "an integer above 0"),
    ("a boolean batch", "c.json", '{"train_batch_size": true}', "c.json:1:2", "true is not legal here"),
    ("a section that is a value", "c.json", '{"fp16": true}', "c.json:1:2", "true is not legal here Write a mapping of keys"),
    ("an open section", "c.json", '{"fp16": "auto"}', "c.json:1:2", '"auto" is not legal here Write a mapping of keys'),
    ("one beta", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "c.json:1:43", "a list of 2 values"),
    ("an unknown optimizer", "c.json", '{"optimizer": {"type": "AdmW"}}', "c.json:1:16", "Did you mean AdamW?"),
    ("an unknown scheduler", "c.json", '{"scheduler": {"type": "WarmupDecay"}}', "c.json:1:16", "Did you mean WarmupDecayLR?"),
    ("an optimizer without type", "c.json", '{"optimizer": {"params": {"lr": 0.1}}}', "c.json:1:2", "optimizer.type: is missing"),
    ("a ratio above one", "c.json", "{" + ZERO3 + '"offload_optimizer": {"device": "cpu", "ratio": 2}}}', "c.json:1:75", "a number from 0 to 1"),
    ("open betas of another number", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": ["auto", 1.5]}}}', "c.json:1:43", "(each a number of at least 0 and below 1 or auto) or auto"),
    ("three betas", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.9, 0.9]}}}', "c.json:1:43", "a list of 2 values (each a number of at least 0 and below 1 or auto) or auto"),
    ("a negative interval", "c.json", '{"steps_per_print": -3}', "c.json:1:2", "-3 is not legal here Write an integer of at least 1, null or auto"),
    ("no interval", "c.json", '{"steps_per_print": 0}', "c.json:1:2", "0 is not legal here"),
    ("a rendezvous option without a value", "c.yaml", "num_processes: 2\nrdzv_conf: timeout\n", "c.yaml:2:1", "Write text such as timeout=60,read_timeout=60."),
    ("a rendezvous option without a name", "c.yaml", "num_processes: 2\nrdzv_conf: a=1,=2\n", "c.yaml:2:1", '"a=1,=2" is not legal here'),
    ("no processes", "c.yaml", "num_processes: 0\n", "c.yaml:1:1", "num_processes: 0 is not legal here Write an integer of at least 1"),
    ("a word for a count", "c.yaml", "num_processes: two\n", "c.yaml:1:1", '"two" is not legal here'),
    ("fp8", "c.yaml", "mixed_precision: fp8\n", "c.yaml:1:1", "ZeRO has no fp8"),
    ("an unknown precision", "c.yaml", "mixed_precision: bf61\n", "c.yaml:1:1", "Did you mean bf16? Write no, fp16, bf16, auto or null."),
    ("FSDP", "c.yaml", "distributed_type: FSDP\n", "c.yaml:1:1", "Write DEEPSPEED with zero_stage: 3"),
    ("Megatron", "c.yaml", "distributed_type: MEGATRON_LM\n", "c.yaml:1:1", "is not supported"),
    ("another device", "c.yaml", "distributed_type: MULTI_NPU\n", "c.yaml:1:1", "this device is not supported"),
    ("SageMaker", "c.yaml", "compute_environment: AMAZON_SAGEMAKER\n", "c.yaml:1:1", "Only LOCAL_MACHINE is supported"),
    ("torch.compile by config", "c.yaml", "use_cpu: true\ndynamo_config:\n  dynamo_backend: INDUCTOR\n", "c.yaml:3:3", "Call torch.compile on the model"),
    ("sequence parallelism", "c.yaml", "parallelism_config:\n  parallelism_config_sp_size: 2\n", "c.yaml:2:3", "Only data parallelism"),
    ("a path for the section", "c.yaml", "deepspeed_config: zero3.json\n", "c.yaml:1:1", "deepspeed_config_file: …"),
    ("a missing named file", "c.yaml", YAML + "  deepspeed_config_file: ds.json\n", "c.yaml:4:3", "no file ds.json"),
    ("a launch config named", "c.yaml", YAML + "  deepspeed_config_file: c.yaml\n", "c.yaml:4:3", "is a launch config"),
    # --- contradictions
    ("fp16 and bf16", "c.json", '{"fp16": {"enabled": true},\n"bf16": {"enabled": "true"}}', "c.json:2:10", "fp16.enabled is true at c.json:1:11"),
    ("precision against a section", "c.yaml", "mixed_precision: bf16\n" + YAML + "  fp16: {enabled: true}\n", "c.yaml:5:10", "mixed_precision is bf16 at c.yaml:1:1"),
    ("precision against one that is off", "c.yaml", "mixed_precision: bf16\n" + YAML + "  bf16: {enabled: false}\n", "c.yaml:5:10", "false, but mixed_precision is bf16"),
    ("no precision against a section", "c.yaml", "mixed_precision: 'no'\n" + YAML + "  bf16: {enabled: true}\n", "c.yaml:5:10", "mixed_precision is no"),
    ("parameter offload at stage 2", "c.yaml", YAML + "  zero_stage: 2\n  offload_param_device: cpu\n", "c.yaml:5:3", "needs ZeRO stage 3, but the stage is 2 at c.yaml:4:3"),
    ("parameter offload without stage", "c.json", '{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "c.json:1:42", "the stage is 0 where none is written"),
    ("NVMe at stage 2", "c.json", "{" + ZERO2 + '"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}', "c.json:1:58", "nvme needs ZeRO stage 3"),
    ("NVMe without a path", "c.yaml", YAML + "  zero_stage: 3\n  offload_param_device: nvme\n  offload_param_nvme_path: none\n", "c.yaml:5:3", "nvme without a path"),
    ("a ratio at stage 2", "c.json", "{" + ZERO2 + '"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}', "c.json:1:75", "0.3 needs ZeRO stage 3"),
    ("super offload at stage 2", "c.json", "{" + ZERO2 + '"offload_optimizer": {"super_offload": true}}}', "c.json:1:58", "true needs ZeRO stage 3"),
    ("batch arithmetic", "c.yaml", YAML + "  train_batch_size: 10\n  train_micro_batch_size_per_gpu: 3\n  gradient_accumulation_steps: 2\n", "c.yaml:4:3", "10, but train_micro_batch_size_per_gpu 3 × gradient_accumulation_steps 2 × num_processes 2 = 12"),
    ("batch division", "c.json", '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}', "c.json:1:2", "not a multiple of train_micro_batch_size_per_gpu 3"),
    ("warm-up beyond the total", "c.json", '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}}', "c.json:1:75", "20 steps of warm-up are more than the total_num_steps of 10"),
    ("prescaling", "c.json", '{"prescale_gradients": true, ' + ZERO2[:-2] + "}}", "c.json:1:2", "reduce_scatter"),
    ("a rank beyond the machines", "c.yaml", "num_machines: 2\nmachine_rank: 2\nnum_processes: 4\n", "c.yaml:2:1", "ranks count from 0"),
    ("uneven machines", "c.yaml", "num_machines: 2\nnum_processes: 3\n", "c.yaml:2:1", "do not divide among 2 machines"),
    ("several processes of one", "c.yaml", "distributed_type: 'NO'\nnum_processes: 2\n", "c.yaml:2:1", "2, but distributed_type NO is one process"),
    ("two filters", "c.yaml", YAML + "  deepspeed_inclusion_filter: a\n  deepspeed_exclusion_filter: b\n", "c.yaml:5:3", "Keep one of the two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "where", "part"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_one_fault_is_one_located_problem(
    name: str, text: str | bytes, where: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fault gives a problem at its exact place, and none elsewhere but its direct consequence."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        check_document(read_document(name))
    at_place = [p for p in caught.value.problems if p.where == where]
    assert at_place, f"nothing at {where}, but:\n{caught.value}"
    assert any(part in f"{p.key}: {p.message} {p.fix}" for p in at_place), caught.value
    assert all(p.fix for p in caught.value.problems)


def test_all_faults_of_all_files_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the YAML and of the JSON that it names are in one error, in reading order."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"fp16": {"enabled": 7},\n "zero_optimization": {"stage": 9}}')
    Path("c.yaml").write_text("num_procs: 2\n" + YAML + "  deepspeed_config_file: ds.json\n  zero3_init_flag: 5\n")
    with pytest.raises(ConfigError) as caught:
        check_document(read_document("c.yaml"))
    assert [p.where for p in caught.value.problems] == ["c.yaml:1:1", "c.yaml:6:3", "ds.json:1:11", "ds.json:2:24"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("yaml_fields", "json_text", "place"),
    [
        ("  zero_stage: 2\n", '{"zero_optimization": {"stage": 3}}', "c.yaml:5:3"),
        ("  gradient_clipping: 0.5\n", '{"gradient_clipping": 1.0}', "c.yaml:5:3"),
        ("  offload_optimizer_device: none\n", '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', "c.yaml:5:3"),
        ("  zero_optimization: {stage: 1}\n", '{"zero_optimization": {"stage": 2}}', "c.yaml:5:23"),
    ],
)  # fmt: skip
def test_short_field_against_the_named_file(
    yaml_fields: str, json_text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML field that differs from the file it names is a problem with both places."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json_text)
    Path("c.yaml").write_text(YAML + "  deepspeed_config_file: ds.json\n" + yaml_fields)
    with pytest.raises(ConfigError) as caught:
        check_document(read_document("c.yaml"))
    (problem,) = caught.value.problems
    assert problem.where == place
    assert "at ds.json:1:" in problem.message


def test_two_names_for_the_training_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a training file named below `deepspeed_config` and another beside it, neither is dropped without a word."""
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("{}")
    Path("c.yaml").write_text("deepspeed_config: {deepspeed_config_file: a.json}\ndeepspeed_config_file: b.json\n")
    with pytest.raises(
        ConfigError, match=r'c\.yaml:2:1: deepspeed_config_file: "b\.json" here, but "a\.json" at c\.yaml:1'
    ):
        check_document(read_document("c.yaml"))


def test_a_folder_where_a_file_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training file that is a folder is called one, not missing."""
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("c.yaml").write_text("deepspeed_config: {deepspeed_config_file: conf}\n")
    with pytest.raises(ConfigError, match="conf is a folder; name a file in it"):
        check_document(read_document("c.yaml"))


def test_a_missing_file_names_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path is answered with the nearest name in that folder; a shared extension makes no name near."""
    monkeypatch.chdir(tmp_path)
    Path("zero3.yaml").write_text("num_processes: 1\n")
    with pytest.raises(ConfigError, match=r"zero33\.yaml: no such file\n.*Did you mean zero3\.yaml"):
        read_document("zero33.yaml")
    Path("zero3.json").write_text("{}")
    for wrong, right in {
        "zreo3.json": "zero3.json",
        "zero3.yml": "zero3",
        "other.yaml": "Check",
        "z.yaml": "Check",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_document(wrong)
        assert caught.value.problems[0].fix.removeprefix("Did you mean ").startswith(right)
    with pytest.raises(ConfigError, match="cannot be read: is a directory"):
        read_document(tmp_path)


@pytest.mark.parametrize("config", [3, ["zero2.yaml"], b"zero2.yaml", None], ids=str)
def test_a_config_that_is_neither_path_nor_dict(config: object) -> None:
    """Says what it is and what is legal, in place of a TypeError from inside."""
    with pytest.raises(ConfigError, match=r"neither a path nor a dict\n.*launch YAML or a DeepSpeed JSON, or a dict"):
        read_document(config)  # type: ignore[arg-type]


def test_a_dict_names_the_call() -> None:
    """A fault in a dict from code is located at the call; a value that is no plain value is refused by type."""
    with pytest.raises(ConfigError, match=r"Accelerator\(config=…\): zero_optimization\.stge: unknown key"):
        check_document(document_from_mapping({"zero_optimization": {"stge": 1}}, "Accelerator(config=…)"))
    with pytest.raises(ConfigError, match="fp16: a object is no plain value"):
        document_from_mapping({"fp16": object()}, "Accelerator(config=…)")
    nested: dict[str, object] = {}
    nested["fp16"] = nested
    with pytest.raises(ConfigError, match="nested deeper"):
        document_from_mapping(nested, "Accelerator(config=…)")


def test_auto_is_no_contradiction(tmp_path: Path) -> None:
    """Fields that are open take part in no contradiction."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "mixed_precision: bf16\nnum_processes: 2\ndeepspeed_config:\n"
        "  fp16: {enabled: auto}\n  bf16: {enabled: auto}\n  train_batch_size: auto\n"
        "  train_micro_batch_size_per_gpu: 3\n  gradient_clipping: auto\n  steps_per_print: null\n"
        "  optimizer: {type: AdamW, params: {betas: [auto, 0.95]}}\n"
        "  zero_optimization:\n    stage: auto\n    offload_param: {device: nvme, nvme_path: auto}\n"
        "  scheduler: {type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: 100}}\n"
    )
    check_document(read_document(path))
