"""The facade with a model whose weights are off its device."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from zero_plugin import Accelerator, cpu_offload, dispatch_model, init_empty_weights
from zero_plugin.errors import LoopError

pytestmark = pytest.mark.usefixtures("ends_processes")


def test_saving(make, tmp_path) -> None:
    """Saving writes all values, tied weights once, and names tensors without values."""
    model = dispatch_model(make(), {"": "disk", "blocks.0": "cpu"}, offload_dir=tmp_path / "offload")
    accelerator = Accelerator()
    accelerator.save_model(model, tmp_path / "saved")
    expected = make().state_dict()
    assert expected.pop("head.weight") is not None
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert torch.equal(accelerator.get_state_dict(model)["head.weight"], expected["embedding.weight"])
    with init_empty_weights():
        empty = make()
    with pytest.raises(ValueError, match=r"embedding\.weight is on the meta device and has no values"):
        accelerator.get_state_dict(empty)


def test_training(make) -> None:
    """Training is refused, because weights that are loaded for a forward get no gradients."""
    with pytest.raises(LoopError, match="whose weights are on the device only during a forward"):
        Accelerator().prepare(cpu_offload(make()))
