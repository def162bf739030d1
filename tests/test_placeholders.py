import pytest
import torch

from zero_plugin.config.placeholders import UNSET, DummyOptim, DummyScheduler
from zero_plugin.errors import ConfigError, LoopError


def test_only_what_was_given_is_described():
    """An argument that the user left out is UNSET, so no default contradicts the file."""
    optimizer = DummyOptim([1, 2], betas=(0.9, 0.95))
    assert optimizer.lr is UNSET
    assert optimizer.describe().given == {"betas": (0.9, 0.95)}
    assert optimizer.describe().placeholder
    assert DummyOptim([1], lr=0.0, weight_decay=0.0).describe().given == {"lr": 0.0, "weight_decay": 0.0}


def test_parameters_may_be_a_generator_or_groups():
    """model.parameters() is read once, and groups keep their own rates."""
    assert DummyOptim(iter([1, 2])).param_groups == [{"params": [1, 2]}]
    groups = [{"params": [1], "lr": 0.1}, {"params": [2]}]
    assert DummyOptim(groups, lr=0.2).describe().group_lrs == (0.1, 0.2)
    assert DummyOptim(groups).describe().group_lrs == ()


@pytest.mark.parametrize("rate", ["x", "auto", None, (0.1,)], ids=str)
def test_a_rate_that_is_no_number_is_an_error_of_the_configuration(rate):
    """For all parameters or for a group, the error has the given value and the legal ones."""
    for optimizer in (DummyOptim([1], lr=rate), DummyOptim([{"params": [1], "lr": rate}])):
        with pytest.raises(ConfigError, match=r"lr: .* is not a number\n.*or leave it out") as caught:
            optimizer.describe()
        assert repr(rate) in str(caught.value)


def test_a_schedule_describes_its_numbers():
    """None, as some scripts pass it, counts as absent."""
    facts = DummyScheduler(None, total_num_steps=10, warmup_num_steps=None, cos_min_ratio=0.1).describe()
    assert (facts.placeholder, facts.total_num_steps, facts.warmup_num_steps) == (True, 10, None)
    assert facts.given == {"cos_min_ratio": 0.1}


def test_a_callable_is_no_placeholder_for_a_section():
    """lr_scheduler_callable builds the schedule itself."""
    assert not DummyScheduler(None, lr_scheduler_callable=lambda optimizer: optimizer).describe().placeholder


@pytest.mark.parametrize(
    "call",
    [DummyOptim([1]).step, DummyOptim([1]).zero_grad, DummyScheduler(None).step],
)
def test_an_unprepared_placeholder_says_to_prepare_it(call):
    """Stepping the placeholder would train nothing."""
    with pytest.raises(LoopError, match="prepare"):
        call()


def test_parameters_come_with_their_names_or_without() -> None:
    """`named_parameters()` works, also in groups, as with torch's optimizers. A single tensor is a group too."""
    model = torch.nn.Linear(2, 2)
    weight, bias = model.parameters()
    assert DummyOptim(model.named_parameters()).params == [weight, bias]
    groups = [{"params": model.named_parameters(), "lr": 0.1}, {"params": [bias]}, {"params": weight}]
    assert [group["params"] for group in DummyOptim(groups, lr=0.2).param_groups] == [[weight, bias], [bias], weight]
