import importlib.util
import sys

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.resolve.facts import MachineFacts, ModelFacts
from zero_plugin.errors import ConfigError

GPU = MachineFacts(accelerator="cuda", processes=4, bf16=True, fp16=True)
CPU = MachineFacts(accelerator="cpu", processes=2)
LARGE = ModelFacts(
    hidden_size=8192, hidden_size_reason="model.config.hidden_size", largest_parameter=10**9, parameters=7 * 10**10
)

SCHEDULE = {"min_value": 1, "max_value": 4, "schedule_type": "fixed_linear"}
SCHEDULE["schedule_config"] = {"require_steps": 4, "seq_per_step": 1}
LAYERS = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_schedule": SCHEDULE}
DROPPING = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True, **LAYERS}}}


def zero(result, *path):
    return result.tree.value("zero_optimization", *path)


@pytest.mark.parametrize(
    ("model", "key", "expected"),
    [
        (LARGE, "reduce_bucket_size", 8192**2),
        (LARGE, "stage3_prefetch_bucket_size", int(0.9 * 8192**2)),
        (LARGE, "stage3_param_persistence_threshold", 81920),
        (ModelFacts(1024, "", 10**7, 10**9), "reduce_bucket_size", 25_000_000),
        (ModelFacts(65536, "", 10**9, 10**12), "reduce_bucket_size", 500_000_000),
        (ModelFacts(64, "", 4096, 100_001), "reduce_bucket_size", 100_001),
        (ModelFacts(None, "", 10**8, 10**9), "reduce_bucket_size", 10**8),
        (None, "reduce_bucket_size", 500_000_000),
        (ModelFacts(64, "", 4096, 100_001), "stage3_param_persistence_threshold", 10_000),
        (ModelFacts(200_000, "", 10**9, 10**12), "stage3_param_persistence_threshold", 1_000_000),
        (None, "stage3_param_persistence_threshold", 100_000),
    ],
)
def test_buckets_come_from_the_model_within_bounds(resolved, model, key, expected):
    """h², 0.9 h² and 10 h, within bounds, at most the model's size; without h from the shapes, or the default."""
    result = resolved({"zero_optimization": {"stage": 3, key: "auto"}}, machine=GPU, model=model)
    assert zero(result, key) == expected
    assert isinstance(zero(result, key), int)
    assert result.tree.get("zero_optimization", key).origin.reason


def test_stage_and_device_need_a_plan(resolved):
    """DeepSpeed would read `stage: auto` as stage 0. In a run without a plan, the error says what to write."""
    config = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}
    with pytest.raises(ConfigError) as caught:
        resolved(config)
    assert [problem.key for problem in caught.value.problems] == [
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
    ]
    assert all("no plan of the memory" in problem.message for problem in caught.value.problems)


def test_without_deepspeed_open_zero_fields_are_none(resolved):
    """On the DDP path an open stage is 0 and an open device none. No value of DeepSpeed is added."""
    config = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto", "pin_memory": "auto"}}}
    result = resolved(config, strategy="ddp")
    assert result.zero_stage == 0
    assert result.offload_device("optimizer") == "none"
    assert "no ZeRO" in result.tree.get("zero_optimization", "stage").origin.reason
    assert "managed_gradient_accumulation" not in result.deepspeed_config()


@pytest.mark.parametrize(("machine", "expected"), [(GPU, True), (CPU, False)])
@pytest.mark.parametrize("written", [{}, {"pin_memory": "auto"}])
def test_pin_memory_is_written_out(resolved, machine, expected, written):
    """DeepSpeed's default changed in 0.19.5, so absent and auto both get a value here."""
    section = {"device": "cpu", **written}
    result = resolved({"zero_optimization": {"stage": 2, "offload_optimizer": section}}, machine=machine)
    assert zero(result, "offload_optimizer", "pin_memory") is expected


@pytest.mark.parametrize(
    ("stage", "written", "expected"), [(3, None, True), (2, None, False), (2, True, True), (1, True, False)]
)
def test_overlap_comm(resolved, document, stage, written, expected):
    """Null follows stage 3. Below stage 2 overlap is off, which is logged once if the user typed it."""
    section = {"stage": stage} if written is None else {"stage": stage, "overlap_comm": written}
    result = resolved({"zero_optimization": section})
    assert zero(result, "overlap_comm") is expected
    logged = [note.remark for note in check_document(document({"zero_optimization": section}))] + [*result.logged]
    assert sum("overlap_comm" in sentence for sentence in logged) == (written is True and not expected)


@pytest.mark.parametrize(
    ("stage", "precision", "written", "expected"),
    [
        (2, "bf16", {}, "fp32"),
        (2, "bf16", {"grad_accum_dtype": "auto"}, "fp32"),
        (2, "bf16", {"grad_accum_dtype": "bf16"}, "bf16"),
        (0, "bf16", {}, None),
        (2, "no", {}, None),
        (0, "bf16", {"grad_accum_dtype": "auto"}, None),
    ],
)
def test_gradients_accumulate_in_fp32_under_bf16(resolved, stage, precision, written, expected):
    """This holds at stages 1-3 unless the user typed another dtype. DeepSpeed refuses fp32 at stage 0."""
    config = {"zero_optimization": {"stage": stage}, "data_types": written}
    result = resolved(config, {"mixed_precision": precision}, machine=GPU)
    assert result.tree.value("data_types", "grad_accum_dtype") == expected


def test_the_engine_runs_as_the_loop_contract_needs(resolved):
    """Unmanaged accumulation, any elementwise optimizer, no forced CPU optimizer."""
    config = resolved({}).deepspeed_config()
    assert config["managed_gradient_accumulation"] is False
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_sub_groups_are_small_enough_for_a_ratio(resolved):
    """With one sub-group a ratio below 1 has no effect, so auto splits a partition into ten."""
    offload = {"device": "cpu", "ratio": 0.3}
    config = {"zero_optimization": {"stage": 3, "sub_group_size": "auto", "offload_optimizer": offload}}
    model = ModelFacts(parameters=4_000_000)
    assert zero(resolved(config, machine=GPU, model=model), "sub_group_size") == 100_000
    offload["ratio"] = 1.0
    assert zero(resolved(config, machine=GPU, model=model), "sub_group_size") == 1_000_000_000


def test_nvme_fields(resolved):
    """On NVMe the buffer fits the largest parameter, parameters do not stay in RAM, and a folder cannot be guessed."""
    offload = {"device": "nvme", "nvme_path": "/nvme", "buffer_size": "auto", "max_in_cpu": "auto"}
    config = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    result = resolved(config, model=ModelFacts(largest_parameter=200_000_000, parameters=10**9))
    assert zero(result, "offload_param", "buffer_size") == 200_000_000
    assert zero(result, "offload_param", "max_in_cpu") == 0
    offload["nvme_path"] = "auto"
    with pytest.raises(ConfigError, match="local NVMe drive"):
        resolved(config)


def test_tokens_that_a_switch_keeps_need_no_gpu(resolved):
    """Without the enabling switch no code reads the section, and the check warns."""
    config = {"data_efficiency": {**DROPPING, "enabled": False}}
    assert resolved(config, machine=CPU).tree.value("data_efficiency", "data_routing", "random_ltd", "enabled") is True


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_gathered_on_save_at_stage_3_only(resolved, stage):
    """`auto` requests the gathering that saving needs."""
    config = {"zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": "auto"}}
    assert zero(resolved(config), "stage3_gather_16bit_weights_on_model_save") is (stage == 3)


@pytest.mark.parametrize(
    "key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"]
)
def test_quantized_partitions_need_a_gpu(resolved, key):
    """Otherwise the kernels would fail to build inside the engine, also if no key says that the run is on a CPU."""
    config = {"zero_optimization": {"stage": 3, key: True}}
    with pytest.raises(ConfigError, match=rf"zero_optimization.{key}: true, but this run is on a CPU(.|\n)*Delete it"):
        resolved(config, machine=CPU)
    assert zero(resolved(config, machine=GPU), key) is True


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("aio.use_gds", {"zero_optimization": {"stage": 1}, "aio": {"use_gds": True}}),
        ("hybrid_engine.enabled", {"zero_optimization": {"stage": 2}, "hybrid_engine": {"enabled": True}}),
        ("data_efficiency.data_routing.random_ltd.enabled", {"data_efficiency": DROPPING}),
    ],
    ids=["a direct disk", "kernels that generate", "dropped tokens"],
)
def test_what_only_a_gpu_has_needs_one(resolved, key, config):
    """This holds also if no key says that the run is on a CPU. On a GPU the value is unchanged."""
    needs = "(it needs|its kernels need) a GPU"
    said = rf"ds.json:{key}: {key}: true, but this run is on a CPU, and {needs}.(.|\n)*Delete it"
    with pytest.raises(ConfigError, match=said):
        resolved(config, machine=CPU)
    assert resolved(config, machine=GPU).tree.value(*key.split(".")) is True


@pytest.mark.parametrize(
    ("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_monitors_need_their_packages(resolved, monkeypatch, section, package):
    """The engine would fail in an import, on rank 0 only. A worker's packages are known only in a run."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    monkeypatch.delitem(sys.modules, package, raising=False)
    config = {section: {"enabled": True}}
    with pytest.raises(ConfigError, match=rf"ds.json:{section}.enabled: {section}.enabled: true, but {package} is not"):
        resolved(config, machine=GPU)
    assert resolved(config, machine=GPU, complete=False).tree.value(section, "enabled") is True
    assert resolved({section: {"enabled": False}}, machine=GPU).tree.value(section, "enabled") is False
    assert resolved(config, machine=GPU, strategy="ddp").tree.value(section, "enabled") is True
