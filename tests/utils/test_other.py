"""Small helpers, saving and loading, as scripts call them."""

from __future__ import annotations

import pickle
import platform
import random
import socket
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zero_plugin.utils.other import (
    extract_model_from_parallel,
    get_pretty_name,
    is_port_in_use,
    load,
    merge_dicts,
    recursive_getattr,
    save,
    wait_for_everyone,
)

pytestmark = pytest.mark.usefixtures("ends_processes")


@pytest.mark.parametrize("on_each_node", [False, True])
def test_saving_and_loading(tmp_path: Path, on_each_node: bool) -> None:
    """Tensors and random states of Python, NumPy and torch load again without running pickled code."""
    state = {
        "weights": nn.Linear(2, 2).state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "array": np.ones((2, 2), dtype=np.float32),
        "number": np.float64(1.5),
    }
    save(state, tmp_path / "state.bin", save_on_each_node=on_each_node)
    loaded = load(tmp_path / "state.bin", map_location="cpu")
    assert loaded["weights"]["bias"].equal(state["weights"]["bias"])
    assert loaded["python"] == state["python"]
    assert (loaded["numpy"][1] == state["numpy"][1]).all()
    assert (loaded["array"] == 1).all()
    assert loaded["number"] == 1.5
    wait_for_everyone()


def test_loading_runs_no_code(tmp_path: Path) -> None:
    """An object of any class is refused, unless pickled code is allowed."""
    save({"size": namedtuple}, tmp_path / "state.bin")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported"):
        load(tmp_path / "state.bin")
    assert load(tmp_path / "state.bin", weights_only=False) == {"size": namedtuple}


def test_saving_as_safetensors(tmp_path: Path) -> None:
    """A state dict with tied weights is written with each of them once."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    save(model.state_dict(), str(tmp_path / "model.safetensors"), safe_serialization=True)
    assert list(load_file(tmp_path / "model.safetensors")) == ["a.weight"]


def test_unwrapping() -> None:
    """The model inside DataParallel is returned."""
    model = nn.Linear(1, 1)
    assert extract_model_from_parallel(nn.DataParallel(model)) is model


def test_merging_dicts() -> None:
    """The source's values win, inner dicts are merged, and the destination is returned."""
    destination = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merge_dicts({"a": {"c": 4, "e": {"f": 5}}, "d": 6}, destination) is destination
    assert destination == {"a": {"b": 1, "c": 4, "e": {"f": 5}}, "d": 6}


def test_attributes_by_dotted_name() -> None:
    """A dotted name is followed attribute by attribute."""
    assert recursive_getattr(platform, "uname.__name__") == "uname"
    with pytest.raises(AttributeError, match="nothing"):
        recursive_getattr(platform, "uname.nothing")


def test_pretty_names() -> None:
    """Functions and classes have their own name, objects that of their class."""
    assert get_pretty_name(nn.Linear) == "Linear"
    assert get_pretty_name(nn.Linear.forward) == "Linear.forward"
    assert get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert get_pretty_name(partial(print)) == "partial"


def test_ports() -> None:
    """A port is in use while a socket listens on it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        assert is_port_in_use(port)
    assert not is_port_in_use(port)
