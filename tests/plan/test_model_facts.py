from types import SimpleNamespace as Config

import pytest
import torch
from torch import nn

from zero_plugin.plan.model_source import probe_model


def model_with(config):
    model = nn.Linear(3, 5)
    model.config = config
    return model


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (Config(hidden_size=64), 64, "model.config.hidden_size"),
        (Config(hidden_sizes=[32, 128, 64]), 128, "the largest of model.config.hidden_sizes"),
        (Config(text_config=Config(hidden_size=96)), 96, "model.config.text_config.hidden_size"),
        (Config(text_config=Config(llm_config={"d_model": 12})), 12, "model.config.text_config.llm_config.d_model"),
        (Config(d_model=48), 48, "model.config.d_model"),
        (Config(n_embd=24), 24, "model.config.n_embd"),
        ({"dim": 16}, 16, "model.config.dim"),
        (Config(hidden_size=None, n_embd=8), 8, "model.config.n_embd"),
    ],
)
def test_the_config_tells_the_width(config, size, reason):
    """Any of the common names works, also nested, in an object or a mapping."""
    facts = probe_model(model_with(config))
    assert (facts.hidden_size, facts.hidden_size_reason) == (size, reason)


@pytest.mark.parametrize("config", [None, Config(vocab_size=100)])
def test_else_the_shapes_tell_it(config):
    """It is the most common dimension of the matrices; vectors do not vote."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 10), nn.LayerNorm(10))
    model.config = config
    facts = probe_model(model)
    assert facts.hidden_size == 16
    assert "most common dimension" in facts.hidden_size_reason


def test_without_matrices_there_is_no_width():
    """A convolution's or a norm's shape states no hidden size."""
    assert probe_model(nn.LayerNorm(7)).hidden_size is None


def test_shared_parameters_count_once_and_partitions_whole():
    """A tied weight is one tensor. A parameter that ZeRO-3 has partitioned counts with its full shape."""
    model = nn.ModuleList([nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)])
    model[1].weight = model[0].weight
    assert (probe_model(model).parameters, probe_model(model).largest_parameter) == (24, 24)
    model[0].weight.ds_shape = torch.Size([40, 60])
    model[0].weight.data = torch.empty(0)
    assert probe_model(model).parameters == 2400
