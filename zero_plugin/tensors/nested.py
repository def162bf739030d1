"""Nested containers of tensors and other leaves (dicts, lists, tuples, dataclasses): walk them, and what is done so."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


def _only_plain_leaves(_: Any) -> bool:
    return False


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = _only_plain_leaves) -> Any:
    """The same containers with `function(leaf)` in place of every leaf.

    Dicts and dict-likes (also transformers' `BatchEncoding`), lists, tuples, named tuples and dataclasses are
    containers and keep their type, unless `is_leaf` says that one is not to be opened; everything else, strings too, is
    a leaf.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, Mapping):
        return _with_values(tree, {key: map_leaves(function, value, is_leaf) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value, is_leaf) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(function, value, is_leaf) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: map_leaves(function, getattr(tree, name), is_leaf) for name in names})
    return function(tree)


def _with_values(mapping: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """A mapping of the same type with other values under its keys."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(values)  # type: ignore[call-arg]
    same = copy.copy(mapping)  # keeps a defaultdict's factory and a BatchEncoding's other attributes
    for key, value in values.items():  # transformers' outputs have no `update`
        same[key] = value
    return same


def list_leaves(tree: Any, is_leaf: Callable[[Any], bool] = _only_plain_leaves) -> list[Any]:
    """Every leaf, in the order in which `map_leaves` meets them."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf  # containers are built again, and some check what they get

    map_leaves(note, tree, is_leaf)
    return leaves


def to_fp32(leaf: Any) -> Any:
    """A 16-bit tensor in fp32, anything else as it is: so a model returns the same type in every precision."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf


@dataclass
class TensorInformation:
    """What `initialize_tensors` needs to make a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items in a list, tuple or named tuple of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same containers with `func(leaf, *args, **kwargs)` for every leaf that `test_type` accepts.

    Args:
        func: gets a leaf.
        data: containers, or a leaf.
        *args: for `func`.
        test_type: which leaves `func` is for.
        error_on_other_type: whether another leaf is an error; else it stays as it is.
        **kwargs: for `func`.

    Raises:
        TypeError: such a leaf.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"Unsupported types ({type(leaf)}) passed to `{func.__name__}`. Only nested list/tuple/dicts of "
                f"objects that are valid for `{test_type.__name__}` should be passed."
            )
        return leaf

    return map_leaves(apply, data, is_leaf=lambda node: not isinstance(node, tuple | list | Mapping))


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """The containers with every tensor, and whatever else has a method `to`, on the device.

    Args:
        tensor: containers, or a tensor.
        device: where to.
        non_blocking: do not wait for copies out of pinned memory.
        skip_keys: keys of dicts, on any level, whose values stay where they are.
    """
    if hasattr(tensor, "to") and not (skip_keys and isinstance(tensor, Mapping)):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of the user's own, or of an old tokenizer
            return tensor.to(device)
    if isinstance(tensor, (tuple, list)):  # not `tuple | list`, which Dynamo of torch 2.9 cannot trace
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skip_keys) for item in tensor))
    if not isinstance(tensor, Mapping):
        return tensor
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    moved = {k: v if k in skipped else send_to_device(v, device, non_blocking, skip_keys) for k, v in tensor.items()}
    return _with_values(tensor, moved)


def get_data_structure(data: Any) -> Any:
    """The containers with a `TensorInformation` for every tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The containers with the shape, a list, for every tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The containers with an uninitialised tensor for every `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Size of the first tensor's first dimension.

    Raises:
        ValueError: the containers are empty.
        TypeError: what comes first is no tensor.
    """
    if isinstance(data, tuple | list | Mapping):
        if not data:
            raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where that raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor; None where there is none."""
    return next((leaf.device for leaf in list_leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """The containers with numbers, in lists as nested as a tensor has dimensions, for every tensor."""
    return recursively_apply(Tensor.tolist, data)


def slice_tensors(data: Any, tensor_slice: slice, *_: int | None, **__: int | None) -> Any:
    """The containers with `tensor[tensor_slice]` for every tensor; Accelerate's two other arguments do nothing."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Containers of one shape, joined tensor by tensor along `dim`.

    Args:
        data: a list of such containers; a single one that holds no tensors is given back.
        dim: dimension along which tensors are joined.

    Raises:
        TypeError: several, with leaves that are no tensors.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([item[key] for item in data], dim) for key in first})  # type: ignore[call-arg]
    if isinstance(first, Tensor):
        return torch.cat(data, dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"Can only concatenate tensors but got {type(first)}")


def convert_to_fp32(tensor: Any) -> Any:
    """The containers with every 16-bit tensor in fp32."""
    return recursively_apply(to_fp32, tensor)


class ConvertOutputsToFp32:
    """A function whose 16-bit tensors come out in fp32.

    Args:
        model_forward: the function.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's outputs, in fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a prepared model with automatic mixed precision cannot be pickled; pickle accelerator.unwrap_model(model)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a forward: its 16-bit outputs come out in fp32. `extract_model_from_parallel` takes it off."""
    convert = ConvertOutputsToFp32(model_forward)

    @functools.wraps(convert)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    return forward
