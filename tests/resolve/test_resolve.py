import json

import pytest

from zero_plugin.config.resolve.facts import (
    Facts,
    LoopFacts,
    MachineFacts,
    ModelFacts,
    OptimizerFacts,
    SchedulerFacts,
    list_values,
)
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import AUTO, holds_auto
from zero_plugin.errors import ConfigError

EVERYTHING = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "AUTO",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "communication_data_type": "auto",
    "steps_per_print": "auto",
    "wall_clock_breakdown": "auto",
    "bf16": {"enabled": "auto", "check_grad_overflow": "auto"},
    "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
    "data_types": {"grad_accum_dtype": "auto", "keep_in_fp32_modules": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", "auto"], "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": "auto",
        "reduce_bucket_size": "auto",
        "sub_group_size": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto", "ratio": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "cpu", "buffer_size": "auto", "buffer_count": "auto"},
    },
    "aio": {"block_size": "auto"},
    "tensorboard": {"enabled": "auto"},
    "managed_gradient_accumulation": "auto",
}
FACTS = Facts(
    loop=LoopFacts(4, "the training DataLoader's batch_size"),
    machine=MachineFacts("cuda", 2, True, True),
    model=ModelFacts(512, "model.config.hidden_size", 10**6, 10**8),
    optimizer=OptimizerFacts(given={"lr": 1e-4}, placeholder=True),
    scheduler=SchedulerFacts(True, 100, 10),
)


@pytest.mark.parametrize("strategy", ["deepspeed", "ddp", "single", "xla"])
def test_no_auto_is_left_and_every_value_has_an_origin(document, strategy):
    """Every open field is filled with a reason on every path, except where `auto` is DeepSpeed's own word."""
    facts = Facts(FACTS.loop, FACTS.machine, FACTS.model, FACTS.optimizer, FACTS.scheduler, strategy=strategy)
    asked = document(EVERYTHING, {"mixed_precision": "bf16"})
    result = resolve(asked, facts)
    still_open = [path for path, entry in result.tree.entries.items() if holds_auto(entry.value)]
    assert still_open == [("data_types", "keep_in_fp32_modules")]
    for row in list_values(asked, result):
        assert bool(row.reason) is (row.kind in ("rule", "default")), row
        assert row.where or row.reason, row
        assert row.value is not AUTO


def test_the_handed_over_config_is_plain_json(document):
    """DeepSpeed gets plain values. The one "auto" is DeepSpeed's own. Only this package steps the schedule."""
    config = resolve(document(EVERYTHING, {"mixed_precision": "bf16"}), FACTS).deepspeed_config()
    text = json.dumps(config)
    assert text.lower().count('"auto"') == 1
    assert config["data_types"]["keep_in_fp32_modules"] == "auto"
    assert config["train_batch_size"] == 8
    assert "scheduler" not in config


def test_resolving_is_repeatable_and_leaves_the_document_alone(document):
    """A second prepare starts from the same raw document and gives the same result."""
    raw = document(EVERYTHING)
    before = dict(raw.deepspeed.entries)
    assert resolve(raw, FACTS) == resolve(raw, FACTS)
    assert dict(raw.deepspeed.entries) == before
    other = resolve(raw, Facts(LoopFacts(2), FACTS.machine, FACTS.model, FACTS.optimizer, FACTS.scheduler))
    assert other.tree.value("train_batch_size") == 4


def test_typed_values_keep_their_place(document):
    """The user's values are untouched, with their file and key."""
    entry = resolve(document({"zero_optimization": {"stage": 2}}), Facts()).tree.get("zero_optimization", "stage")
    assert (entry.value, entry.origin.where) == (2, "ds.json:zero_optimization.stage")


def test_all_problems_of_all_topics_come_at_once(document):
    """Precision, ZeRO, optimizer, schedule and an unknown key are one error."""
    config = {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "something": {"of_mine": "auto"},
    }
    with pytest.raises(ConfigError) as caught:
        resolve(document(config), Facts())
    assert [problem.key for problem in caught.value.problems] == [
        "fp16.enabled",
        "zero_optimization.stage",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "something.of_mine",
    ]
    assert all(problem.where.startswith("ds.json:") and problem.fix for problem in caught.value.problems)


def test_what_the_loop_gives_is_held_to_the_schema(resolved):
    """A placeholder's wrong argument is refused like a wrong value in a file, with its origin."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    optimizer = OptimizerFacts(given={"lr": -1, "betas": (0.9, 1.2)}, group_lrs=(-1,), placeholder=True)
    with pytest.raises(ConfigError, match=r"lr: -1 is not legal here: from DummyOptim\.\n.*at least 0") as caught:
        resolved(config, optimizer=optimizer)
    assert {problem.key for problem in caught.value.problems} == {"optimizer.params.lr", "optimizer.params.betas"}


def test_an_argument_that_the_described_optimizer_does_not_have_is_refused(resolved):
    """`betas` for SGD would reach the engine as an unexpected keyword."""
    optimizer = OptimizerFacts(given={"lr": 0.1, "betas": (0.9, 0.95)}, group_lrs=(0.1,), placeholder=True)
    with pytest.raises(ConfigError, match=r"betas: SGD has no such parameter: from DummyOptim\..*\n.*momentum"):
        resolved({"optimizer": {"type": "SGD"}}, optimizer=optimizer)


def test_another_optimizer_than_described_is_one_problem(resolved):
    """Open values in a section whose type is refused are no further problems."""
    sgd = OptimizerFacts(name="sgd", given={"lr": 0.1}, group_lrs=(0.1,))
    with pytest.raises(ConfigError) as caught:
        resolved({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, optimizer=sgd)
    assert [problem.key for problem in caught.value.problems] == ["optimizer.type"]
