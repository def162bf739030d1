"""Walk nested containers (dicts, lists, tuples, dataclasses) of tensors and other leaves, and transform the leaves."""

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
    """Return the same containers with each leaf replaced by `function(leaf)`.

    Containers keep their type. They are dicts and dict-likes (also transformers' `BatchEncoding`), lists, tuples, named
    tuples and dataclasses, unless `is_leaf` returns True for them. All other objects, strings too, are leaves.
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
    """Return a mapping of the same type with other values under its keys."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(values)  # type: ignore[call-arg]
    same = copy.copy(mapping)  # keeps a defaultdict's factory and a BatchEncoding's other attributes
    for key, value in values.items():  # transformers' outputs have no `update`
        same[key] = value
    return same


def list_leaves(tree: Any, is_leaf: Callable[[Any], bool] = _only_plain_leaves) -> list[Any]:
    """List all leaves in the order in which `map_leaves` visits them."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf  # `map_leaves` builds the containers again, and some container types check their items

    map_leaves(note, tree, is_leaf)
    return leaves


def to_fp32(leaf: Any) -> Any:
    """Convert a 16-bit tensor to fp32, and keep other leaves: a model returns the same dtype in every precision."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf


@dataclass
class TensorInformation:
    """The shape and dtype from which `initialize_tensors` creates a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether the object is a tensor."""
    return isinstance(tensor, Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether the object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether the object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items as a list, tuple or named tuple of `obj`'s type."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace every leaf that `test_type` accepts by `func(leaf, *args, **kwargs)`. Return new containers.

    Args:
        func: called with a leaf.
        data: containers, or a leaf.
        *args: further arguments of `func`.
        test_type: returns whether `func` applies to a leaf.
        error_on_other_type: whether other leaves are an error. By default they stay as they are.
        **kwargs: keyword arguments of `func`.

    Raises:
        TypeError: `error_on_other_type` is set, and `test_type` rejects a leaf.
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
    """Move all tensors, and all other objects with a method `to`, to the device.

    Args:
        tensor: containers, or a tensor.
        device: the target.
        non_blocking: do not wait for copies from pinned memory.
        skip_keys: keys of dicts, on any level, whose values are not moved.
    """
    if hasattr(tensor, "to") and not (skip_keys and isinstance(tensor, Mapping)):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # the `to` of a user's class, or of an old tokenizer, has no `non_blocking`
            return tensor.to(device)
    if isinstance(tensor, (tuple, list)):  # not `tuple | list`, which Dynamo of torch 2.9 cannot trace
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skip_keys) for item in tensor))
    if not isinstance(tensor, Mapping):
        return tensor
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    moved = {k: v if k in skipped else send_to_device(v, device, non_blocking, skip_keys) for k, v in tensor.items()}
    return _with_values(tensor, moved)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace every tensor by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` by an uninitialised tensor."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Return the size of the first tensor's first dimension.

    Raises:
        ValueError: a container is empty.
        TypeError: the first leaf is not a tensor.
    """
    if isinstance(data, tuple | list | Mapping):
        if not data:
            raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
        return find_batch_size(next(iter(data.values())) if isinstance(data, Mapping) else data[0])
    if not isinstance(data, Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the result of `find_batch_size`, or None if it raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor, or None without tensors."""
    return next((leaf.device for leaf in list_leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Replace every tensor by its numbers, as nested lists."""
    return recursively_apply(Tensor.tolist, data)


def slice_tensors(data: Any, tensor_slice: slice, *_: int | None, **__: int | None) -> Any:
    """Replace every tensor by `tensor[tensor_slice]`. Accelerate's two other arguments have no effect."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate equally nested containers, tensor by tensor, along `dim`.

    Args:
        data: a list of containers. With a single one, leaves that are not tensors are returned as they are.
        dim: dimension along which tensors are joined.

    Raises:
        TypeError: there are several containers, with leaves that are not tensors.
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
    """Convert every 16-bit tensor to fp32."""
    return recursively_apply(to_fp32, tensor)


class ConvertOutputsToFp32:
    """A function whose 16-bit outputs are converted to fp32.

    Args:
        model_forward: the function.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's outputs in fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a prepared model with automatic mixed precision cannot be pickled; pickle accelerator.unwrap_model(model)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a forward: convert its 16-bit outputs to fp32. `extract_model_from_parallel` removes the decorator."""
    convert = ConvertOutputsToFp32(model_forward)

    @functools.wraps(convert)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    return forward
