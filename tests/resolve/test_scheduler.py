import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.resolve.facts import MachineFacts, OptimizerFacts, SchedulerFacts
from zero_plugin.errors import ConfigError

FOUR = MachineFacts(processes=4)
OPTIMIZER = OptimizerFacts(given={"lr": 3e-4}, placeholder=True)


def dummy(total=None, warmup=None, **given):
    return SchedulerFacts(True, total, warmup, given)


def section(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("counts", "split", "expected"),
    [
        ("steps", False, (1001, 102)),
        ("processes", False, (251, 26)),
        (None, False, (251, 26)),
        ("auto", False, (251, 26)),
        ("processes", True, (1001, 102)),
    ],
)
def test_the_placeholder_counts_as_asked(resolved, counts, split, expected):
    """`steps` is the typed number.

    `processes` divides total *and* warm-up by W, rounded up, except with split_batches.
    """
    config = section("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto")
    launch = {} if counts is None else {"scheduler_counts": counts}
    result = resolved(
        config, launch, machine=FOUR, optimizer=OPTIMIZER, scheduler=dummy(1001, 102), split_batches=split
    )
    params = result.scheduler.params
    assert (params["total_num_steps"], params["warmup_num_steps"]) == expected
    assert result.scheduler_counts == (counts if counts in ("steps", "processes") else "processes")


def test_numbers_typed_into_the_section_are_optimizer_steps(resolved):
    """They are never divided, however the loop counts."""
    config = section("WarmupDecayLR", total_num_steps=1000, warmup_num_steps=100, warmup_max_lr=1e-3)
    params = resolved(config, {"scheduler_counts": "processes"}, machine=FOUR).scheduler.params
    assert (params["total_num_steps"], params["warmup_num_steps"]) == (1000, 100)


def test_a_placeholder_alone_warms_up_and_decays_linearly(resolved):
    """DummyScheduler without a section is WarmupDecayLR, linear, to the optimizer's rate, and is logged."""
    result = resolved({}, {"scheduler_counts": "steps"}, optimizer=OPTIMIZER, scheduler=dummy(100, 10))
    assert result.scheduler.type == "WarmupDecayLR"
    assert result.scheduler.params == {
        "total_num_steps": 100,
        "warmup_num_steps": 10,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-4,
        "warmup_type": "linear",
    }
    assert any("linear decay to 0" in sentence for sentence in result.logged)


def test_a_placeholder_without_a_length_stays_constant(resolved):
    """Without total_num_steps the decay has no end: the rate is constant after warm-up, which is none by default."""
    result = resolved({}, optimizer=OPTIMIZER, scheduler=dummy())
    assert (result.scheduler.type, result.scheduler.params["warmup_num_steps"]) == ("WarmupLR", 0)
    assert any("constant" in sentence for sentence in result.logged)


def test_no_warm_up_is_legal(resolved):
    """DummyScheduler's default of 0, which DeepSpeed refuses, is no warm-up."""
    config = section("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto", warmup_max_lr="auto")
    assert resolved(config, optimizer=OPTIMIZER, scheduler=dummy(100)).scheduler.params["warmup_num_steps"] == 0


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (section("WarmupDecayLR", total_num_steps="auto", warmup_num_steps=5), "total_num_steps"),
        (section("WarmupDecayLR", total_num_steps=50, warmup_num_steps="auto"), "warmup_num_steps"),
        (section("WarmupCosineLR"), "total_num_steps"),
        (section("OneCycle", cycle_max_lr=1e-3), "cycle_min_lr"),
        (section("StepLR", step_size="auto"), "step_size"),
    ],
)
def test_what_no_placeholder_tells_is_refused(resolved, config, key):
    """For a required or open number that the loop does not provide, the error says what to write or pass."""
    with pytest.raises(ConfigError) as caught:
        resolved(config)
    assert [problem.key for problem in caught.value.problems] == [f"scheduler.params.{key}"]
    assert "DummyScheduler(optimizer" in caught.value.problems[0].fix


def test_clashes_with_the_placeholder_are_listed_at_once(resolved):
    """The numbers are compared as optimizer steps: 400 of 4 processes equal 100 in the file. Other numbers clash."""
    config = section("WarmupDecayLR", total_num_steps=100, warmup_num_steps=10, warmup_max_lr=1e-3)
    assert resolved(config, machine=FOUR, scheduler=dummy(400, 40)).scheduler
    with pytest.raises(ConfigError) as caught:
        resolved(config, machine=FOUR, scheduler=dummy(100, 10, warmup_max_lr=2e-3))
    assert len(caught.value.problems) == 3
    assert "DummyScheduler's 100 ÷ 4 processes" in str(caught.value)


def test_a_real_schedule_beside_a_section_is_refused(resolved):
    """Only one of the two would run."""
    with pytest.raises(ConfigError, match="schedule of its own"):
        resolved(section("WarmupLR"), scheduler=SchedulerFacts(placeholder=False))


def test_an_absent_warmup_type_stays_deepspeeds_log_and_is_said(resolved):
    """A migrated config keeps its curve. Our own default is linear."""
    result = resolved(section("WarmupLR", warmup_num_steps=10))
    assert result.scheduler.params["warmup_type"] == "log"
    assert any("logarithmic" in sentence for sentence in result.logged)
    assert resolved(section("WarmupLR", warmup_type="auto")).scheduler.params["warmup_type"] == "linear"


def test_groups_keep_their_own_peaks(resolved):
    """If parameter groups differ in learning rate, an open peak is one number per group."""
    optimizer = OptimizerFacts(name="adamw", given={"lr": 1e-3}, group_lrs=(1e-3, 1e-4))
    result = resolved({}, optimizer=optimizer, scheduler=dummy(100, 10))
    assert result.scheduler.params["warmup_max_lr"] == [1e-3, 1e-4]


def test_a_default_peak_that_replaces_the_rate_is_said(resolved):
    """DeepSpeed's WarmupDecayLR rises to 0.001 for any optimizer's rate unless a peak is set."""
    config = section("WarmupDecayLR", total_num_steps=100, warmup_num_steps=10)
    result = resolved(config, optimizer=OptimizerFacts(given={"lr": 3e-5}, placeholder=True))
    assert result.scheduler.params["warmup_max_lr"] == 1e-3
    assert any("warmup_max_lr = 0.001" in sentence for sentence in result.logged)


def test_a_warm_up_nobody_asked_for_is_said(resolved):
    """An absent warmup_num_steps is DeepSpeed's 1000, not the placeholder's 0, and is logged."""
    result = resolved(section("WarmupLR"), scheduler=dummy())
    assert result.scheduler.params["warmup_num_steps"] == 1000
    assert any("warmup_num_steps = 1000" in sentence for sentence in result.logged)


def test_arguments_that_do_not_shape_the_schedule_are_said(resolved):
    """WarmupLR has no end. The log mentions the placeholder's total instead of dropping it silently."""
    result = resolved(section("WarmupLR", warmup_num_steps=5), scheduler=dummy(100, 5))
    assert any("total_num_steps" in sentence for sentence in result.logged)


def test_an_unknown_counting_is_refused(document):
    """Only `steps` and `processes` are legal. The check says so before resolving."""
    with pytest.raises(ConfigError, match="steps or processes"):
        check_document(document({}, {"scheduler_counts": "epochs"}))


def test_a_placeholder_without_a_total(resolved):
    """The message names the argument that DummyScheduler lacks, not the existing placeholder."""
    config = section("WarmupDecayLR", total_num_steps="auto")
    with pytest.raises(ConfigError, match=r"auto, and there is no total_num_steps in the DummyScheduler") as raised:
        resolved(config, optimizer=OPTIMIZER, scheduler=dummy())
    assert "pass DummyScheduler(optimizer, total_num_steps=…)" in str(raised.value)
