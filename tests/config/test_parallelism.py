"""`ParallelismConfig` compared with Accelerate's own, by its constructor, its variables and its properties."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from zero_plugin.config.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig, sequence_size_in_code
from zero_plugin.errors import ConfigError

theirs: Any = pytest.importorskip("accelerate.parallelism_config", reason="Accelerate is not installed")
dataclasses: Any = pytest.importorskip("accelerate.utils.dataclasses")

SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
PROPERTIES = (
    *("dp_dim_names", "non_dp_dim_names", "active_mesh_dims", "total_size", "data_parallel_size"),
    *("non_data_parallel_size", "dp_replicate_enabled", "dp_shard_enabled", "tp_enabled", "cp_enabled", "sp_enabled"),
)


def built(kind: Any, **arguments: Any) -> Any:
    """Return the record, or the kind of error that it raises."""
    try:
        return kind(**arguments)
    except ValueError:
        return ValueError


@pytest.mark.parametrize("in_variables", [False, True])
def test_sizes(in_variables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each combination of sizes is legal in both or in neither, and means the same."""
    for sizes in product((1, 2), (1, 4), (1, 2), (1, 2), (1, 2, 0)):
        named = dict(zip(SIZES, sizes, strict=True))
        if in_variables:
            for name, size in named.items():
                monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", str(size))
        given = {} if in_variables else named
        ours, other = built(ParallelismConfig, **given), built(theirs.ParallelismConfig, **given)
        if ValueError in (ours, other):
            assert ours is other, named
            continue
        for name in (*SIZES, *PROPERTIES, "cp_backend", "sp_backend"):
            assert getattr(ours, name) == getattr(other, name), (name, named)
        assert (ours.sp_handler is None) == (other.sp_handler is None)


@pytest.mark.parametrize("arguments", [{"sp_backend": "torch"}, {"cp_backend": "deepspeed"}, {"sp_size": -1}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    """Both refuse them."""
    assert built(ParallelismConfig, **arguments) is built(theirs.ParallelismConfig, **arguments) is ValueError


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"sp_seq_length": 8},
        {"sp_seq_length_is_variable": False},
        {"sp_seq_length_is_variable": False, "sp_seq_length": 8},
        *({"sp_attn_implementation": name} for name in ("sdpa", "eager", "kernels-community/flash-attn2", "mine")),
    ],
    ids=str,
)
def test_handlers(arguments: dict[str, Any]) -> None:
    """The record of sequence parallelism agrees too."""
    ours = built(DeepSpeedSequenceParallelConfig, **arguments)
    other = built(dataclasses.DeepSpeedSequenceParallelConfig, **arguments)
    assert ours is other if other is ValueError else vars(ours) == vars(other)


def test_in_code() -> None:
    """Accelerate's own record is accepted as well. Other dimensions and other objects are errors."""
    assert sequence_size_in_code(None) is None
    assert sequence_size_in_code(theirs.ParallelismConfig(sp_size=4)) == 4
    with pytest.raises(ConfigError, match="cp_size: 2 is not supported"):
        sequence_size_in_code(ParallelismConfig(cp_size=2))
    with pytest.raises(ConfigError, match="a dict is no ParallelismConfig"):
        sequence_size_in_code({"sp_size": 2})
