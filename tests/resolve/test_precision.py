import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.resolve.facts import MachineFacts
from zero_plugin.errors import ConfigError

GPU = MachineFacts(accelerator="cuda", bf16=True, fp16=True)
OLD_GPU = MachineFacts(accelerator="cuda", bf16=False, fp16=True)
CPU = MachineFacts(accelerator="cpu", bf16=True, fp16=False)


@pytest.mark.parametrize(
    ("training", "launch", "machine", "expected"),
    [
        ({}, {}, GPU, "no"),
        ({}, {"mixed_precision": None}, GPU, "no"),
        ({}, {"mixed_precision": "bf16"}, GPU, "bf16"),
        ({}, {"mixed_precision": "auto"}, GPU, "bf16"),
        ({}, {"mixed_precision": "auto"}, OLD_GPU, "fp16"),
        ({}, {"mixed_precision": "auto"}, MachineFacts(bf16=False, fp16=False), "no"),
        ({"bf16": {"enabled": False}}, {"mixed_precision": "auto"}, GPU, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"mixed_precision": "fp16"}, GPU, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {}, GPU, "no"),
        ({"fp16": {"loss_scale": 0}}, {"mixed_precision": "fp16"}, GPU, "fp16"),
        ({"fp16": {"loss_scale": 0}}, {}, GPU, "no"),
        ({"fp16": {"enabled": True}}, {}, GPU, "fp16"),
        ({"fp16": {"enabled": True}}, {"mixed_precision": "auto"}, GPU, "fp16"),
        ({"bf16": {"enabled": True}}, {"mixed_precision": "bf16"}, CPU, "bf16"),
    ],
)
def test_one_precision_comes_of_three_settings(resolved, training, launch, machine, expected):
    """mixed_precision, fp16.enabled and bf16.enabled give one precision, which both sections get."""
    result = resolved(training, launch, machine=machine)
    assert result.precision == expected
    assert result.tree.value("fp16", "enabled") is (expected == "fp16")
    assert result.tree.value("bf16", "enabled") is (expected == "bf16")
    assert result.launch.value("mixed_precision") == expected or launch.get("mixed_precision") == expected


@pytest.mark.parametrize(
    ("training", "asked"),
    [
        ({"fp16": {"enabled": False}}, "fp16"),
        ({"fp16": {"enabled": True}}, "no"),
        ({"bf16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "auto"),
    ],
)
def test_contradicting_settings_are_refused_with_both_places(resolved, training, asked):
    """A section that contradicts mixed_precision is an error at the section's line."""
    with pytest.raises(ConfigError, match=r"ds\.json:(fp|bf)16\.enabled"):
        resolved(training, {"mixed_precision": asked}, machine=GPU)


def test_a_flag_overrides_the_file(resolved):
    """--mixed_precision wins over the sections, and the reason names both."""
    result = resolved({"fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "flag", machine=GPU)
    assert result.precision == "bf16"
    assert "overrides ds.json:fp16.enabled" in result.tree.get("fp16", "enabled").origin.reason


def test_code_does_not_override_the_file(resolved):
    """An argument in code that contradicts an explicit value of the file is an error."""
    with pytest.raises(ConfigError, match=r"mixed_precision is bf16"):
        resolved({"fp16": {"enabled": True}}, {"mixed_precision": "bf16"}, "code", machine=GPU)


def test_fp16_with_deepspeed_on_a_cpu_is_refused_before_the_start(resolved):
    """DeepSpeed would refuse it late. Without DeepSpeed it runs."""
    with pytest.raises(ConfigError, match=r"does not run fp16 on a cpu device.*\n.*Write bf16"):
        resolved({}, {"mixed_precision": "fp16"}, machine=CPU)
    assert resolved({}, {"mixed_precision": "fp16"}, machine=CPU, strategy="ddp").precision == "fp16"


def test_emulated_bf16_is_logged(resolved):
    """bf16 on a device without native support runs slowly, which is logged."""
    result = resolved({}, {"mixed_precision": "bf16"}, machine=OLD_GPU)
    assert any("emulated" in sentence for sentence in result.logged)


@pytest.mark.parametrize(("word", "message"), [("int8", "no, fp16, bf16, auto"), ("fp8", "Write bf16")])
def test_unknown_precision_is_refused(document, word, message):
    """An unsupported precision is refused before resolving, with the legal values."""
    with pytest.raises(ConfigError, match=message):
        check_document(document({}, {"mixed_precision": word}))


@pytest.mark.parametrize(("stage", "said"), [(0, True), (1, True), (2, False), (3, True)])
def test_an_overflow_check_that_stays_on_is_said(resolved, stage, said):
    """DeepSpeed can leave out the check at stage 2 only."""
    config = {"bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": stage}}
    lines = resolved(config, machine=GPU, strategy="deepspeed").logged
    assert any("check_grad_overflow = false has no effect" in line for line in lines) is said


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"fp16": {"hysteresis": 4}}, "fp16.hysteresis = 4 has no effect: fp16 is off."),
        ({"bf16": {"immediate_grad_update": True}}, "bf16.immediate_grad_update = true has no effect: bf16 is off."),
        (
            {"data_types": {"buffer_dtype": "fp16"}},
            'data_types.buffer_dtype = "fp16" has no effect: the model is in fp32',
        ),
    ],
)
def test_what_belongs_to_a_precision_that_nobody_chose_is_said(resolved, training, said):
    """The document alone cannot show that it has no effect: a flag or the script may still choose the precision."""
    assert any(said in line for line in resolved(training, {}, machine=GPU).logged)
    assert not any(said in line for line in resolved(training, {"mixed_precision": "fp16"}, machine=GPU).logged)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast: true, but fp16 is off"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype: bf16, but the model is in fp32"),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype: bf16 with a model in fp32 needs ZeRO",
        ),
    ],
)
def test_what_contradicts_the_precision_that_nobody_chose_is_refused(resolved, training, message):
    """DeepSpeed would cast inputs, or refuse to start with an unclear error."""
    with pytest.raises(ConfigError, match=message):
        resolved(training, {}, machine=GPU)
