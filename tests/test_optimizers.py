import copy

import pytest
import torch

from zero_plugin.config.resolve.facts import OptimizerSection
from zero_plugin.config.schema import OPTIMIZER_DEFAULTS
from zero_plugin.errors import ConfigError
from zero_plugin.strategies.torch_optimizers import Lion, build_optimizer, describe_optimizer


def train(optimizer_of, steps=5):
    """Return the parameters of a tiny regression after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = optimizer_of(list(model.parameters()))
    x, y = torch.randn(16, 4), torch.randn(16, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("kind", "params", "reference"),
    [
        ("AdamW", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        ("AdamW", {"lr": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
        ("Adam", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        (
            "Adam",
            {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False},
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        (
            "adamw",
            {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": True, "bias_correction": True, "adam_w_mode": False},
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0),
        ),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("RMSprop", {"lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01)),
        ("Adagrad", {"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ("NAdam", {"lr": 0.1}, lambda p: torch.optim.NAdam(p, lr=0.1)),
    ],
)
def test_a_section_builds_what_deepspeed_would_compute(kind, params, reference):
    """The torch object of each section trains bit for bit like the one written by hand."""
    built = train(lambda p: build_optimizer(OptimizerSection(kind, params), p))
    assert torch.equal(built, train(reference))


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Lamb", {}, "DeepSpeed only"),
        ("Muon", {}, "DeepSpeed only"),
        ("AdamV", {}, "neither"),
        ("AdamW", {"bias_correction": False}, "bias_correction"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("AdamW", {"momentum": 0.9}, "unexpected keyword"),
        ("AdamW", {"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_what_torch_cannot_honour_is_refused(kind, params, message):
    """No value of a section is dropped silently."""
    with pytest.raises(ConfigError, match=message):
        build_optimizer(OptimizerSection(kind, params), [torch.nn.Parameter(torch.zeros(1))])


def test_state_precision_is_honoured_or_refused():
    """torch's states have the parameters' dtype: fine for fp32 parameters, refused for others."""
    section = OptimizerSection("AdamW", {"fp32_optimizer_states": True})
    assert build_optimizer(section, [torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="fp32_optimizer_states"):
        build_optimizer(section, [{"params": [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]}])


def test_groups_keep_their_own_values():
    """A group's own learning rate and decay win over the section's."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.0},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5},
    ]
    built = build_optimizer(OptimizerSection("AdamW", {"lr": 0.1, "weight_decay": 0.2}), groups)
    assert [(group["lr"], group["weight_decay"]) for group in built.param_groups] == [(0.1, 0.0), (0.5, 0.2)]


def test_lion_follows_the_paper_by_groups():
    """Two steps by hand: interpolated momentum's sign, decoupled decay, then the momentum."""
    first, second = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    optimizer = Lion(
        [{"params": [first]}, {"params": [second], "lr": 0.01, "betas": (0.5, 0.5)}], lr=0.1, weight_decay=0.5
    )
    gradients = [torch.tensor([0.3, -0.1, 0.0]), torch.tensor([-4.0, 0.2, 0.0])]
    expected = []
    for parameter, lr, beta1, beta2 in ((first, 0.1, 0.9, 0.999), (second, 0.01, 0.5, 0.5)):
        weight, momentum = parameter.detach().clone(), torch.zeros(3)
        for gradient in gradients:
            update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
            weight = weight * (1 - lr * 0.5) - lr * update
            momentum = beta2 * momentum + (1 - beta2) * gradient
        expected.append(weight)
    for gradient in gradients:
        first.grad, second.grad = gradient.clone(), gradient.clone()
        optimizer.step()
    torch.testing.assert_close(first.detach(), expected[0])
    torch.testing.assert_close(second.detach(), expected[1])


def test_lion_continues_from_its_state():
    """A restored Lion takes the same next step as one that never stopped."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Lion([parameter], lr=0.1)
    parameter.grad = torch.tensor([1.0, -1.0, 1.0])
    optimizer.step()
    copied = torch.nn.Parameter(parameter.detach().clone())
    restored = Lion([copied])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((parameter, optimizer), (copied, restored)):
        p.grad = torch.tensor([-0.001, 0.001, 0.001])
        o.step()
    assert torch.equal(parameter, copied)


def test_a_real_optimizer_is_described():
    """The description has the name, plain arguments, and each group's rate before any schedule."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)
    facts = describe_optimizer(optimizer)
    assert (facts.name, facts.group_lrs, facts.placeholder) == ("adamw", (0.1, 0.5), False)
    assert facts.given["weight_decay"] == 0.01
    assert describe_optimizer(torch.optim.Adam(parameters, lr=torch.tensor(0.5))).given["lr"] == 0.5


def test_defaults_are_deepspeeds():
    """The value for an absent argument is the default of DeepSpeed's own class."""
    import inspect
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    classes = {
        "adam": [DeepSpeedCPUAdam, FusedAdam],
        "adamw": [DeepSpeedCPUAdam, FusedAdam],
        "adagrad": [DeepSpeedCPUAdagrad, torch.optim.Adagrad],
        "lion": [DeepSpeedCPULion, FusedLion, Lion],
        "sgd": [torch.optim.SGD],
        "rmsprop": [torch.optim.RMSprop],
    }
    for kind, implementations in classes.items():
        for implementation in implementations:
            parameters = inspect.signature(implementation).parameters
            for name, value in OPTIMIZER_DEFAULTS[kind].items():
                if name != "adam_w_mode":
                    assert parameters[name].default == value, (implementation, name)
