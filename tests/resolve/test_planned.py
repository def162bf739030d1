"""A memory plan's choices fill the open fields, each with its reason, and change nothing otherwise."""

from __future__ import annotations

import pytest

from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, ModelFacts
from zero_plugin.config.resolve.resolve import config_for_scripts, resolve, resolve_before_run
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError
from zero_plugin.launch.command import foreign_variables
from zero_plugin.launch.spec import Program, Request
from zero_plugin.plan.run_plan import lay_plan

GPU = MachineFacts(accelerator="cuda", processes=4, bf16=True, fp16=True)
STAGE = ("zero_optimization", "stage")
OPTIMIZER = ("zero_optimization", "offload_optimizer", "device")
RATIO = ("zero_optimization", "offload_optimizer", "ratio")
PARAM = ("zero_optimization", "offload_param", "device")
MICRO = ("train_micro_batch_size_per_gpu",)
OPEN = {
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "auto", "ratio": "auto", "pin_memory": "auto", "nvme_path": "/nvme"},
        "offload_param": {"device": "auto"},
        "sub_group_size": "auto",
        "overlap_comm": "auto",
    }
}
PLAN = {
    STAGE: (3, "the fastest that fits"),
    OPTIMIZER: ("cpu", "without it 30 GiB are needed of 24 GiB"),
    PARAM: ("none", "the parameters fit"),
    RATIO: (0.4, "the rest fits on the GPU"),
}


def test_open_fields_take_the_plan(resolved):
    """Stage, devices and ratio are the plan's, with its reason, and are logged. Dependent values follow."""
    result = resolved(OPEN, machine=GPU, model=ModelFacts(parameters=4_000_000), planned=PLAN)
    for path, (value, reason) in PLAN.items():
        entry = result.tree.get(*path)
        assert (entry.value, entry.origin.reason, entry.origin.kind) == (value, reason, "rule")
        assert f"{'.'.join(path)} = {value}: {reason}" in result.logged
    zero = result.deepspeed_config()["zero_optimization"]
    assert zero["overlap_comm"] is True  # stage 3
    assert zero["offload_optimizer"]["pin_memory"] is True
    assert zero["sub_group_size"] == 100_000  # a tenth of a process's partition, so the ratio can split it
    assert "auto" not in str(zero)


def test_the_plan_overrides_nothing_that_is_typed(resolved):
    """A typed stage or device stays, since the plan was made around it."""
    typed = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    result = resolved(typed, machine=GPU, planned=PLAN)
    assert (result.zero_stage, result.offload_device("optimizer")) == (2, "none")


@pytest.mark.parametrize(
    ("stage", "more", "said"),
    [
        (3, {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: sum is refused at ZeRO stage 3"),
        (
            3,
            {"zero_optimization": {"compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm: false needs ZeRO stage 1 or 2",
        ),
        (
            2,
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "zero_optimization.offload_optimizer.ratio: 0.5 needs ZeRO stage 3",
        ),
        (1, {"optimizer": {"type": "Lamb"}, "zero_allow_untested_optimizer": False}, "optimizer.type: Lamb scales"),
    ],
    ids=["a sum", "a norm", "a ratio", "Lamb"],
)
def test_what_contradicts_the_planned_stage_is_an_error(document, resolved, stage, more, said):
    """The contradiction exists only with the planned stage. The engine would fail with a traceback."""
    config = {**more, "zero_optimization": {"stage": "auto", **more.get("zero_optimization", {})}}
    plan = {STAGE: (stage, "the fastest that fits")}
    for found, facts in (  # in a run, and as `launch --model` passes a plan on
        (document(config), Facts(machine=GPU, planned=plan)),
        (lay_plan(document(config), plan), Facts(machine=GPU)),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(found, facts)
        (problem,) = caught.value.problems
        assert problem.headline.startswith(f"ds.json:{said.partition(':')[0]}: {said}")
        assert f"the stage is {stage}, which the plan has chosen" in problem.message
    assert resolved({"zero_optimization": {"stage": "auto"}}, machine=GPU, planned=plan).zero_stage == stage


def test_a_planned_sub_group_is_added(resolved):
    """A ratio acts on complete sub-groups, so the plan may add their size if the file has no such key."""
    sub_group = ("zero_optimization", "sub_group_size")
    section = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}}
    planned = {RATIO: (0.5, "half fits"), sub_group: (1000, "small enough for the ratio")}
    assert resolved(section, machine=GPU, planned=planned).tree.value(*sub_group) == 1000


def test_nvme_still_needs_a_folder(resolved):
    """A plan can choose NVMe, but cannot guess the folder."""
    section = {"stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"}}
    with pytest.raises(ConfigError, match="local NVMe drive"):
        resolved({"zero_optimization": section}, planned={STAGE: (3, "why"), OPTIMIZER: ("nvme", "why")})


@pytest.mark.parametrize("complete", [True, False])
def test_the_micro_batch_is_the_loaders_then_the_plans(document, complete):
    """A loader's size wins. Otherwise the plan's micro-batch counts, and accumulation follows from the global batch."""
    asked = document({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"})
    planned = {MICRO: (8, "the fastest that fits")}
    alone = resolve(asked, Facts(machine=GPU, complete=complete, planned=planned))
    assert (alone.tree.value(*MICRO), alone.accumulation) == (8, 2)
    assert alone.tree.get(*MICRO).origin.reason == "the fastest that fits"
    loop = LoopFacts(4, "the training DataLoader's batch_size")
    with_loader = resolve(asked, Facts(loop=loop, machine=GPU, complete=complete, planned=planned))
    assert (with_loader.tree.value(*MICRO), with_loader.accumulation) == (4, 4)


def test_a_micro_batch_planned_before_the_run_gives_way_to_the_loader(document):
    """The launcher passes its plan on as a value. The loader's micro-batch is used, and this is logged."""
    asked = document({"train_micro_batch_size_per_gpu": "auto"})
    handed = resolve(asked, Facts(machine=GPU, complete=False, planned={MICRO: (8, "why")}))
    laid = type(asked)(asked.launch, asked.deepspeed.replace({MICRO: handed.tree.get(*MICRO)}), asked.sources)
    assert resolve(laid, Facts(machine=GPU)).tree.value(*MICRO) == 8
    result = resolve(laid, Facts(LoopFacts(4, "the training DataLoader's batch_size"), GPU))
    assert result.tree.value(*MICRO) == 4
    assert any("plan was made for 8" in line for line in result.logged)


def test_a_script_of_accelerate_is_not_run_at_stage_0(document):
    """While the plan is open, this script gets no DeepSpeed JSON. The stage that it gets stops it."""
    asked = document(OPEN, {"distributed_type": "DEEPSPEED"})
    found = resolve_before_run(asked, accelerator="cuda", processes=4, strategy="deepspeed")
    assert found.tree.value(*STAGE) is AUTO
    assert config_for_scripts(asked, found) is None
    request = Request(asked, launch_settings(asked), Program("train.py"), {}, None)
    variables = foreign_variables(request, found, on_cpu=False)
    assert variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"].value == "auto"
    assert "--model" in variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"].reason
