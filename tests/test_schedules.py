import json
import os
import textwrap
from itertools import pairwise

import pytest
import torch

from zero_plugin.config.resolve.facts import SchedulerSection
from zero_plugin.config.schema import SCHEDULER_DEFAULTS, SCHEDULER_REQUIRED
from zero_plugin.errors import ConfigError
from zero_plugin.strategies.torch_optimizers import CURVES, build_scheduler

os.environ.setdefault("DS_ACCELERATOR", "cpu")

CASES = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 0.01}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": [1e-5, 1e-6], "warmup_max_lr": [0.01, 0.02]}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 1e-4}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_num_steps": 5, "warmup_max_lr": [0.01, 0.03]}),
    ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 9}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 10}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_ratio": 0.2},
    ),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 3, "cos_min_ratio": 0.3}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 8}),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.01, "cycle_first_step_size": 9}),
    (
        "OneCycle",
        {
            "cycle_min_lr": [1e-3, 2e-3],
            "cycle_max_lr": [0.01, 0.02],
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 14,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.1,
            "cycle_min_mom": [0.7, 0.75],
            "cycle_max_mom": 0.95,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 0.01,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 15,
            "cycle_first_stair_count": 4,
            "cycle_second_stair_count": 3,
            "decay_step_size": 5,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.01, "cycle_first_step_size": 6, "cycle_second_step_size": 0}),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.01, "cycle_first_step_size": 6, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_step_size": 7}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [1e-3, 1e-2],
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 2.5,
            "lr_range_test_staircase": True,
        },
    ),
]


def adam():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.003}], lr=0.005)


def walk(optimizer, scheduler, steps=60):
    """Return learning rates and betas of every group as used by each optimizer step."""
    used = []
    for _ in range(steps):
        used.append([value for group in optimizer.param_groups for value in (group["lr"], *group["betas"])])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_every_step_equals_deepspeeds_own_class(kind, params):
    """Learning rate and momentum of every group agree to 1e-12 at each of 60 steps."""
    from deepspeed.runtime import lr_schedules

    theirs = adam()
    expected = walk(theirs, getattr(lr_schedules, kind)(theirs, **params))
    ours = adam()
    assert walk(ours, build_scheduler(SchedulerSection(kind, params), ours)) == [
        pytest.approx(row, abs=1e-12, rel=0) for row in expected
    ]


def test_defaults_are_deepspeeds():
    """The table of defaults equals the classes' own signatures."""
    import inspect

    from deepspeed.runtime import lr_schedules

    for kind, defaults in SCHEDULER_DEFAULTS.items():
        parameters = inspect.signature(getattr(lr_schedules, kind)).parameters.values()
        named = {p.name: p.default for p in parameters if p.name not in ("optimizer", "last_batch_iteration")}
        required = {name for name, default in named.items() if default is inspect.Parameter.empty}
        assert required == SCHEDULER_REQUIRED[kind]
        assert {name: default for name, default in named.items() if name not in required} == dict(defaults)
    assert set(CURVES) == set(SCHEDULER_DEFAULTS)


ENGINE = """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    import torch, deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 20 s to build, and nothing here uses it
    section = json.loads(sys.argv[1])
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
    model = torch.nn.Linear(2, 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "torch_adam": True}},
        "scheduler": section,
        "zero_optimization": {"stage": 1},
    }
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, dist_init_required=False)
    used = []
    for _ in range(12):
        used.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    print("USED", json.dumps(used))
    torch.distributed.destroy_process_group()
"""


def test_the_rate_applied_is_the_engines(tmp_path, run_python):
    """A real engine that owns the schedule applies the same rate at each optimizer step, the first two included."""
    params = {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.02}
    section = {"type": "WarmupDecayLR", "params": params}
    arguments = ["-c", textwrap.dedent(ENGINE), json.dumps(section), tmp_path / "store"]
    done = run_python(*arguments, DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr[-2000:]
    applied = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("USED"))[5:])
    optimizer = adam()
    schedule = build_scheduler(SchedulerSection("WarmupDecayLR", params), optimizer)
    ours = [row[0] for row in walk(optimizer, schedule, steps=len(applied))]
    assert ours == pytest.approx(applied, abs=1e-12, rel=0)
    assert applied[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "params", "first", "last"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, 0.005, 0.005),
        ("WarmupDecayLR", {"warmup_num_steps": 0, "total_num_steps": 20, "warmup_max_lr": 0.01}, 0.01, 0.0),
        ("WarmupCosineLR", {"warmup_num_steps": 0, "total_num_steps": 20}, 0.005, 0.005 * 1e-4),
    ],
)
def test_no_warm_up_starts_at_the_peak(kind, params, first, last):
    """warmup_num_steps 0, which DeepSpeed refuses, means no warm-up."""
    optimizer = adam()
    used = walk(optimizer, build_scheduler(SchedulerSection(kind, params), optimizer), steps=23)
    assert used[0][0] == pytest.approx(first)
    assert used[22][0] == pytest.approx(last)
    assert all(later[0] <= earlier[0] for earlier, later in pairwise(used))


@pytest.mark.parametrize(("kind", "params"), [CASES[5], CASES[14]])
def test_a_restored_schedule_continues(kind, params):
    """After load_state_dict on a fresh optimizer, groups immediately have the saved values, and continue equally."""
    one, other = adam(), adam()
    schedule = build_scheduler(SchedulerSection(kind, params), one)
    walk(one, schedule, steps=17)
    restored = build_scheduler(SchedulerSection(kind, params), other)
    restored.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert restored.get_last_lr() == schedule.get_last_lr()
    assert walk(other, restored, steps=20) == walk(one, schedule, steps=20)


def test_momentum_stays_where_there_is_none_to_cycle():
    """SGD has no betas: OneCycle drives the learning rate alone, and warns."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    section = SchedulerSection("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0})
    with pytest.warns(UserWarning, match="no betas"):
        build_scheduler(section, optimizer)
    assert "betas" not in optimizer.param_groups[0]


def test_torchs_own_schedules_are_built_by_name():
    """Any class of torch.optim.lr_scheduler with plain arguments works."""
    schedule = build_scheduler(SchedulerSection("CosineAnnealingLR", {"T_max": 10}), adam())
    assert isinstance(schedule, torch.optim.lr_scheduler.CosineAnnealingLR)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecayLR", {}, "total_num_steps: is required"),
        ("WarmupLR", {"warmup_steps": 5}, "warmup_steps: is not a parameter"),
        ("WarmupLR", {"warmup_type": "cosine"}, "log or linear"),
        ("WarmupLR", {"warmup_num_steps": -1}, "negative"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2, 0.3]}, "3 values for 2 parameter groups"),
        ("WarmupLR", {"last_batch_iteration": 5}, "load_state"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "not a cycle"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "not above 0"),
        ("CosineLR", {}, "neither"),
        ("StepLR", {}, "step_size"),
    ],
)
def test_an_impossible_section_is_refused(kind, params, message):
    """Unknown, missing and impossible parameters are named."""
    with pytest.raises(ConfigError, match=message):
        build_scheduler(SchedulerSection(kind, params), adam())
