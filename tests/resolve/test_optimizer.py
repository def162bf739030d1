import pytest

from zero_plugin.config.resolve.facts import MachineFacts, OptimizerFacts
from zero_plugin.config.schema import OPTIMIZER_DEFAULTS
from zero_plugin.errors import ConfigError

GPU = MachineFacts(accelerator="cuda", bf16=True, fp16=True)
CPU = MachineFacts(accelerator="cpu")


def placeholder(**given):
    return OptimizerFacts(given=given, placeholder=True)


def real(name, **given):
    return OptimizerFacts(name=name, given=given, group_lrs=(given.get("lr", 1e-3),))


def section(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("params", "given", "expected"),
    [
        ({"lr": "auto", "betas": "auto"}, {"lr": 3e-4, "betas": (0.9, 0.95)}, {"lr": 3e-4, "betas": [0.9, 0.95]}),
        ({"lr": 1e-4}, {"lr": 1e-4}, {"lr": 1e-4}),
        ({}, {"lr": 3e-4, "eps": 1e-6}, {"lr": 3e-4, "eps": 1e-6}),
        ({"betas": ["auto", 0.98]}, {"betas": [0.8, 0.98]}, {"betas": [0.8, 0.98]}),
        ({"weight_decay": "auto", "eps": "auto", "betas": "auto"}, {}, dict(OPTIMIZER_DEFAULTS["adamw"])),
        ({"lr": "auto"}, {}, {"lr": 1e-3}),
    ],
)
def test_the_placeholder_fills_what_is_open(resolved, params, given, expected):
    """Each argument of DummyOptim fills its own field, absent or open. The rest are the optimizer's defaults."""
    result = resolved(section("AdamW", **params), optimizer=placeholder(**given), machine=GPU)
    found = result.optimizer.params
    for name, value in expected.items():
        assert found[name] == (list(value) if isinstance(value, tuple) else value)
    assert set(OPTIMIZER_DEFAULTS["adamw"]) <= set(found)


def test_every_clash_with_the_placeholder_is_listed_at_once(resolved):
    """Typed arguments against different typed values are one error, with all pairs and their lines."""
    config = section("AdamW", lr=1e-3, betas=[0.9, 0.999], weight_decay=0.1)
    with pytest.raises(ConfigError) as caught:
        resolved(config, optimizer=placeholder(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1))
    assert {problem.key for problem in caught.value.problems} == {"optimizer.params.lr", "optimizer.params.betas"}
    assert caught.value.problems[1].where == "ds.json:optimizer.params.lr"
    assert caught.value.problems[1].message == "0.001 here, but DummyOptim says 0.002."


def test_a_placeholder_without_a_section_is_adamw_and_logged(resolved):
    """DummyOptim alone trains with AdamW and DummyOptim's arguments."""
    result = resolved({}, optimizer=placeholder(lr=3e-4), machine=GPU)
    assert result.optimizer.type == "AdamW"
    assert result.optimizer.params["lr"] == 3e-4
    assert any("AdamW" in sentence for sentence in result.logged)


def test_a_real_optimizer_without_a_section_has_none(resolved):
    """The loop's own optimizer needs no description."""
    assert resolved({}, optimizer=real("sgd", lr=0.1)).optimizer is None


def test_lr_auto_without_an_optimizer_cannot_be_filled(resolved):
    """The learning rate is unknown. The error says what to write or pass."""
    with pytest.raises(ConfigError, match=r"DummyOptim\(params, lr=…\)"):
        resolved(section("AdamW", lr="auto"))


@pytest.mark.parametrize(
    ("config", "optimizer", "accepted"),
    [
        (section("AdamW", lr="auto"), real("adamw", lr=3e-4, weight_decay=0.01), True),
        (section("Adam", lr=3e-4), real("adamw", lr=3e-4, weight_decay=0.01), True),
        (section("Adam", adam_w_mode=False), real("adam", lr=3e-4, weight_decay=0.01), True),
        (section("Adam"), real("adam", lr=3e-4, weight_decay=0.0), True),
        (section("SGD", lr=0.1, momentum=0.9), real("sgd", lr=0.1, momentum=0.9), True),
        (section("Adam"), real("adam", lr=3e-4, weight_decay=0.01), False),
        (section("Adam", adam_w_mode=False), real("adamw", lr=3e-4, weight_decay=0.01), False),
        (section("AdamW", lr=1e-3), real("adamw", lr=3e-4), False),
        (section("AdamW", lr="auto"), real("sgd", lr=0.1), False),
    ],
)
def test_a_real_optimizer_beside_a_section_has_to_agree(resolved, config, optimizer, accepted):
    """The same algorithm with equal shared arguments is accepted, and open ones are filled.

    Otherwise the error names both.
    """
    if accepted:
        params = resolved(config, optimizer=optimizer, machine=GPU).optimizer.params
        assert params["lr"] == optimizer.given["lr"]
        assert params.get("weight_decay", 0.0) == optimizer.given.get("weight_decay", 0.0)
    else:
        with pytest.raises(ConfigError, match=r"the loop's|loop's"):
            resolved(config, optimizer=optimizer, machine=GPU)


@pytest.mark.parametrize(
    ("kind", "machine", "offload", "params", "strategy", "expected"),
    [
        ("AdamW", CPU, "none", {}, "deepspeed", True),
        ("Adam", CPU, "none", {"torch_adam": "auto"}, "deepspeed", True),
        ("AdamW", CPU, "cpu", {}, "deepspeed", None),
        ("AdamW", GPU, "none", {}, "deepspeed", None),
        ("AdamW", GPU, "none", {"torch_adam": "auto"}, "deepspeed", False),
        ("AdamW", CPU, "none", {"torch_adam": False}, "deepspeed", False),
        ("AdamW", CPU, "none", {"bias_correction": False}, "deepspeed", None),
        ("SGD", CPU, "none", {}, "deepspeed", None),
        ("AdamW", CPU, "none", {}, "ddp", None),
    ],
)
def test_torch_adam_on_a_cpu(resolved, kind, machine, offload, params, strategy, expected):
    """On a CPU without offload torch's Adam runs, since building the fused kernel takes over a minute."""
    config = section(kind, **params) | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": offload}}}
    found = resolved(config, machine=machine, strategy=strategy).optimizer.params
    assert found.get("torch_adam") is expected


def test_torch_adam_gets_no_argument_that_torch_lacks(resolved):
    """torch always behaves like bias_correction: true. With torch_adam, false is refused."""
    params = resolved(section("AdamW", torch_adam=True, bias_correction=True), machine=GPU).optimizer.params
    assert "bias_correction" not in params
    with pytest.raises(ConfigError, match="bias_correction"):
        resolved(section("AdamW", torch_adam=True, bias_correction=False), machine=GPU)


@pytest.mark.parametrize("strategy", ["deepspeed", "ddp"])
@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.2}, 0.2),
        ("AdamW", {}, 0.0),
    ],
)
def test_torch_adam_that_is_typed_has_torchs_weight_decay(resolved, strategy, kind, params, expected):
    """DeepSpeed's engine passes only the written value to torch's AdamW. If this package chooses torch, 0 stays."""
    found = resolved(section(kind, **params), optimizer=placeholder(lr=1e-3), machine=CPU, strategy=strategy)
    assert found.optimizer.params["weight_decay"] == expected


@pytest.mark.parametrize(
    ("config", "key", "strategy"),
    [
        (section("Lamb"), "optimizer.type", "deepspeed"),
        (section("AdamW", capturable=True), "optimizer.params.capturable", "deepspeed"),
        (section("AdamW", capturable=True), "optimizer.params.capturable", "ddp"),
    ],
)
def test_what_only_a_gpu_steps(resolved, config, key, strategy):
    """DeepSpeed and torch would fail with unclear errors, also if no key says that the run is on a CPU."""
    with pytest.raises(ConfigError, match=rf"{key}: .* a GPU, but this run is on a CPU"):
        resolved(config, machine=CPU, strategy=strategy)
    resolved(config, machine=GPU, strategy=strategy)
    if "capturable" in key:  # DeepSpeed's kernel for the CPU steps
        resolved(config | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, machine=CPU)


def test_amsgrad_needs_torch_adam(resolved):
    """DeepSpeed's kernels have no amsgrad (the CPU kernel would ignore the option)."""
    with pytest.raises(ConfigError, match="AMSGrad"):
        resolved(section("AdamW", amsgrad=True), machine=GPU)
    assert resolved(section("AdamW", amsgrad=True), machine=CPU).optimizer.params["amsgrad"] is True


def test_defaults_that_mislead_are_logged(resolved):
    """The start logs an absent weight decay (0), a default rate, and an Adam that is AdamW."""
    said = " ".join(resolved(section("AdamW"), optimizer=placeholder(), machine=GPU).logged)
    assert "weight_decay = 0" in said
    assert "optimizer.params.lr = 0.001" in said
    said = " ".join(resolved(section("Adam", weight_decay=0.1), machine=GPU).logged)
    assert "adam_w_mode: false gives L2" in said
    assert "weight_decay = 0" not in said


@pytest.mark.parametrize("params", [None, {}])
def test_a_section_without_params(resolved, params):
    """`params` may be absent, null or empty. Every default is written out."""
    config = {"optimizer": {"type": "SGD", "params": params}}
    assert resolved(config).optimizer.params == dict(OPTIMIZER_DEFAULTS["sgd"])
    assert resolved({"optimizer": {"type": "SGD"}}).optimizer.params == dict(OPTIMIZER_DEFAULTS["sgd"])
    assert resolved({"optimizer": {"type": "NAdam", "params": params}}).optimizer.params == {}
