import pytest

from zero_plugin.config.resolve.facts import LoopFacts, MachineFacts
from zero_plugin.errors import ConfigError

LOADER = LoopFacts(micro_batch=8, micro_batch_reason="the training DataLoader's batch_size")
PEEKED = LoopFacts(micro_batch=8, micro_batch_reason="the first batch", micro_batch_fixed=False)
FOUR = MachineFacts(processes=4)


def triple(result):
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return tuple(result.tree.value(name) for name in names)


@pytest.mark.parametrize(
    ("micro", "accumulation", "total", "loop", "expected"),
    [
        (None, None, None, LoopFacts(), (1, 1, 4)),
        ("auto", "auto", "auto", LOADER, (8, 1, 32)),
        (None, None, None, LOADER, (8, 1, 32)),
        (8, 2, None, LOADER, (8, 2, 64)),
        (8, "auto", 128, LOADER, (8, 4, 128)),
        ("auto", "auto", 64, LOADER, (8, 2, 64)),
        (None, None, 64, LoopFacts(), (16, 1, 64)),
        (None, 2, 64, LoopFacts(), (8, 2, 64)),
        (2, None, 8, LoopFacts(), (2, 1, 8)),
        (4, 3, 48, LoopFacts(), (4, 3, 48)),
        (4, 1, 16, PEEKED, (4, 1, 16)),
    ],
)
def test_the_open_sizes_follow_from_the_given_ones(resolved, micro, accumulation, total, loop, expected):
    """micro × accumulation × 4 processes = global, whichever of the three are open or absent."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    given = dict(zip(names, (micro, accumulation, total), strict=True))
    config = {name: value for name, value in given.items() if value is not None}
    result = resolved(config, machine=FOUR, loop=loop)
    assert triple(result) == expected
    assert result.accumulation == expected[1]


@pytest.mark.parametrize(
    ("config", "loop", "arithmetic"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            LoopFacts(),
            r"64 is not 4 \(micro batch\) × 2 \(accumulation\) × 4 \(processes\) = 32",
        ),
        ({"train_batch_size": 10}, LOADER, r"10 is not 8 .* × 4 \(processes\) = 32"),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": "auto"}, LOADER, r"48 is not 8"),
        ({"train_micro_batch_size_per_gpu": 4}, LOADER, r"4, but the loop trains on 8 \(the training DataLoader"),
    ],
)
def test_sizes_that_cannot_hold_are_refused_with_the_arithmetic(resolved, config, loop, arithmetic):
    """An inconsistent product is an error, and so is a loader with another batch size."""
    with pytest.raises(ConfigError, match=arithmetic):
        resolved(config, machine=FOUR, loop=loop)


@pytest.mark.parametrize("total", [32, "auto"])
def test_a_micro_batch_that_the_loader_contradicts_is_the_only_problem(resolved, total):
    """The arithmetic of the refused size gives no second advice that contradicts the first."""
    config = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 32}
    with pytest.raises(ConfigError) as caught:
        resolved(config, machine=FOUR, loop=LOADER)
    assert [problem.key for problem in caught.value.problems] == ["train_micro_batch_size_per_gpu"]


def test_accumulation_found_from_the_global_batch_is_logged(resolved):
    """Accumulation changes when parameters change, so it is logged for the user."""
    result = resolved({"train_batch_size": 64}, machine=FOUR, loop=LOADER)
    assert any(sentence.startswith("gradient_accumulation_steps = 2") for sentence in result.logged)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"gradient_clipping": "auto"}, None),
        ({"gradient_clipping": None}, None),
        ({"gradient_clipping": 0}, None),
        ({"gradient_clipping": 0.5}, 0.5),
    ],
)
def test_absent_clipping_is_none_and_written_out(resolved, config, expected):
    """No clipping is 0 in DeepSpeed's file, since DeepSpeed's own default clips at 1. For the loop it is None."""
    result = resolved(config)
    assert result.clipping == expected
    assert result.deepspeed_config()["gradient_clipping"] == (expected or 0.0)
