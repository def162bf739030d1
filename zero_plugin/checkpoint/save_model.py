"""Writes a model's weights as a Hugging Face model folder. Every process writes its own ranges; nothing is gathered.

For a model with PEFT adapters, writes the tensors that PEFT stores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.disk import sync
from zero_plugin.checkpoint.publish import discard_draft, open_draft
from zero_plugin.checkpoint.save import agree_on, missing_marks
from zero_plugin.checkpoint.tensor_files import (
    Description,
    Layout,
    complete_pieces,
    create_files,
    describe,
    is_weight_file,
    plan_layout,
    write_fragments,
)
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import SCRIPT, all_or_none, announce, on_main
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError, ConfigError, LoopError, Problem
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import WEIGHT, Fragment, persistent_tensors, reading_names, shared_names
from zero_plugin.tensors.safetensors_files import INDEX_NAME

_CONVERTED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NAMED: Final[Mapping[object, torch.dtype]] = {
    **dict.fromkeys(("fp32", "float32", torch.float32), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", torch.float16), torch.float16),
}


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The tensors of one model that are saved.

    Attributes:
        descriptions: the unpartitioned tensors, with their stored dtypes.
        fragments: returns the fragments that this process writes. Each may be used until the next one is taken. Their
            dtypes may differ from the stored ones.
        in_ranges: whether each process gives its own ranges and has the same descriptions. Otherwise the main process
            gives all tensors, and the other processes take part in the collective calls.
    """

    descriptions: list[Description]
    fragments: Callable[[], Iterator[Fragment]]
    in_ranges: bool

    def unpartitioned(self) -> Iterator[Fragment]:
        """Yield unpartitioned tensors one at a time, to be written by the main process. Collective."""
        is_main = collectives.process_index() == 0
        for fragment in self.fragments():
            if not self.in_ranges:
                yield fragment
                continue
            values = collectives.gather(fragment.part_to_write())  # ranges are in the order of the ranks
            yield replace(fragment, start=0, values=values, written=(0, values.numel() if is_main else 0))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating dtype that `save_model(dtype=…)` names.

    Raises:
        ConfigError: no such dtype is supported.
    """
    if dtype is not None and dtype not in _NAMED:
        fix = 'write "fp32", "bf16", "fp16" or torch\'s own, or leave it out for the type that is trained in'
        raise ConfigError(
            [Problem(f"save_model(dtype={dtype!r})", "dtype", "not a type that weights are saved in", fix)]
        )
    return None if dtype is None else _NAMED[dtype]


def names_to_save(module: nn.Module, *, trainable_only: bool) -> frozenset[str]:
    """Return the names of the tensors to save. A shared tensor is listed under its first name.

    Args:
        module: the user's own module, whose parameters may be partitioned.
        trainable_only: save only parameters with `requires_grad`.

    Raises:
        LoopError: there are no tensors to save.
    """
    # Tensors that transformers does not save, such as computed position embeddings.
    unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()
    names = frozenset(
        name
        for name, tensor in persistent_tensors(module)
        if name not in unsaved and (tensor.requires_grad or not trainable_only)
    )
    if not names:
        which = "parameter that is trained" if trainable_only else "weight"
        raise LoopError(f"save_model: the {type(module).__name__} has no {which}.")
    return names


def weights_of_session(session: Session, names: Collection[str], dtype: torch.dtype | None) -> SavedWeights:
    """Return the weights of a prepared model, in ranges if the session supports ranges, otherwise unpartitioned.

    A parameter that is converted, or is not in memory, is taken from the weights that the optimizer steps.

    Args:
        session: the model's session.
        names: names of the tensors.
        dtype: the dtype for floating parameters; None for the dtype that each is trained in.

    Raises:
        CheckpointError: fp32 master weights are requested, but cannot be accessed.
    """
    try:
        present = [fragment for fragment in session.weight_fragments() if fragment.name in names]
    except CheckpointError as error:
        if dtype == torch.float32 and any(p.requires_grad and p.dtype != dtype for p in session.module.parameters()):
            raise CheckpointError(f"save_model(dtype={dtype}) takes the fp32 master weights. {error}") from error
        return weights_of_module(session.module, lambda: session.named_tensors(names), dtype)
    types = _stored_types(session.module, describe(present), dtype)

    def fragments() -> Iterator[Fragment]:
        left = {fragment.name: fragment for fragment in session.weight_fragments() if fragment.name in types}
        stepped = {n for n, f in left.items() if f.is_elsewhere or f.values.dtype != types[n].dtype}
        for pieces in session.blocks(changing=False) if stepped else ():
            for piece in pieces:
                if piece.name in stepped:
                    del left[piece.name]
                    yield piece.weight()
        yield from session.fetched(left.values(), changing=False)

    return SavedWeights(list(types.values()), fragments, in_ranges=True)


def weights_of_module(
    module: nn.Module, tensors: Callable[[], Iterable[tuple[str, Tensor]]], dtype: torch.dtype | None
) -> SavedWeights:
    """Return unpartitioned weights, which the main process writes.

    Args:
        module: the module with the tensors.
        tensors: returns an iterator of names and tensors. It may be called repeatedly, and may be collective.
        dtype: see `weights_of_session`.
    """

    def fragments() -> Iterator[Fragment]:
        is_main = collectives.process_index() == 0
        for name, tensor in tensors():
            written = (0, tensor.numel() if is_main else 0)
            yield Fragment(WEIGHT, name, tuple(tensor.shape), 0, tensor.detach(), written)

    types = _stored_types(module, describe(fragments()), dtype)
    return SavedWeights(list(types.values()), fragments, in_ranges=False)


def _stored_types(
    module: nn.Module, descriptions: Iterable[Description], dtype: torch.dtype | None
) -> dict[str, Description]:
    """Return the tensors with their stored dtypes, by name. Buffers and quantized weights keep their dtype."""
    parameters = {name for name, _ in module.named_parameters()}
    return {
        d.name: replace(d, dtype=dtype) if dtype is not None and d.dtype in _CONVERTED and d.name in parameters else d
        for d in descriptions
    }


def write_model(
    weights: SavedWeights,
    target: Path,
    *,
    max_shard_bytes: int,
    tied: Mapping[str, str],
    notes: Mapping[str, str],
    write_more: Callable[[Path], None],
) -> None:
    """Write `weights` into `target`, for `from_pretrained` or any reader of safetensors. Collective.

    Files are first written into a draft inside `target`, and moved when all are complete. An error on any process
    leaves an older model in `target` unchanged. On success, surplus weight files of the older model are removed; other
    files stay. If some processes do not see the main process's folder, which is then on another machine's disk, the
    main process writes alone: the others send it one tensor after another.

    Args:
        weights: the weights.
        target: the folder; created if it is missing.
        max_shard_bytes: the largest size of a file; a larger tensor gets a file of its own.
        tied: name → the name whose tensor it shares. Only the latter is stored. The file's metadata has the pair, like
            that of the safetensors library.
        notes: further metadata of the files.
        write_more: called on the main process with the draft folder, to add further files.

    Raises:
        CheckpointError: on every process, if one process cannot write.
    """
    descriptions = weights.descriptions
    layout = all_or_none(lambda: plan_layout(descriptions, max_shard_bytes=max_shard_bytes, tied=tied, notes=notes))
    if weights.in_ranges:
        agree_on([layout])
    draft = Path(on_main(lambda: str(open_draft(target / "weights", sum(layout.sizes.values())))))
    try:
        on_main(lambda: create_files(draft, [layout]))
        is_shared = not weights.in_ranges or not missing_marks(draft)[0]
        if not is_shared:
            announce(
                f"save_model: {target} is not on a file system that all processes share. The main process writes alone"
            )
        fragments = weights.fragments() if is_shared else weights.unpartitioned()
        total = sum(layout.sizes.values()) // (collectives.num_processes() if weights.in_ranges and is_shared else 1)
        with working(f"saving {target.name}", total) as work:
            own = all_or_none(lambda: _write(draft, fragments, layout, work.advance))
            written = SCRIPT.gather(own)
            on_main(lambda: _complete(draft, target, layout, written, write_more))
    finally:
        if collectives.process_index() == 0:
            discard_draft(draft)


def unpartitioned_tensors(weights: SavedWeights) -> dict[str, Tensor]:
    """Return CPU copies of small weights, in their stored dtypes, on the main process; {} on others. Collective."""
    types = {description.name: description.dtype for description in weights.descriptions}
    is_main = collectives.process_index() == 0
    return {
        fragment.name: fragment.values.reshape(fragment.shape).to("cpu", types[fragment.name], copy=True)
        for fragment in weights.unpartitioned()
        if is_main
    }


def _write(draft: Path, fragments: Iterator[Fragment], layout: Layout, progress: Callable[[int], None]) -> str:
    """Write this process's ranges. Return the text of `write_fragments`."""
    try:
        return write_fragments(draft, [(fragments, layout)], progress)
    except Exception:
        for _ in fragments:  # consume the rest: other processes may still be sending their parts
            pass
        raise


def _complete(
    draft: Path, target: Path, layout: Layout, written: Sequence[str | None], write_more: Callable[[Path], None]
) -> None:
    complete_pieces([layout], written)  # checks that every byte was written
    write_more(draft)
    names = [path.name for path in sorted(draft.iterdir()) if not path.name.startswith(".")]
    for name in names:
        sync(draft / name)  # including the files of `write_more`
    _publish(draft, target, names)


def _publish(draft: Path, target: Path, names: list[str]) -> None:
    """Move complete files into place. A reader sees the old model's weights or the new one's, never a mixture."""
    names.sort(key=lambda name: name == INDEX_NAME)  # after its shards
    old = {path.name for path in target.iterdir() if is_weight_file(path.name)}
    if INDEX_NAME in old and len(old.intersection(names)) > 1:
        # The new shards have the same names as the old ones. Without an index, a half-renamed set is not a model.
        (target / INDEX_NAME).unlink()
    for name in names:
        (draft / name).replace(target / name)
    for name in sorted(old.difference(names), key=lambda name: name != INDEX_NAME):  # the index before its shards
        (target / name).unlink(missing_ok=True)
    sync(target)


def has_adapters(module: nn.Module) -> bool:
    """Return whether a module has PEFT adapters: a PeftModel, or a transformers model after `add_adapter`."""
    return "peft" in sys.modules and bool(getattr(module, "peft_config", None))


def adapter_names(module: Any) -> frozenset[str]:
    """Return names of the tensors that PEFT stores for all adapters of `module`, and of all other trained tensors.

    PEFT's own function selects them from empty stand-ins, so nothing is gathered. PEFT may ask the Hub for the base
    model's configuration, and two processes may get different answers.
    """
    from peft import get_peft_model_state_dict

    names = [*(name for name, _ in persistent_tensors(module)), *shared_names(module)]
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    with reading_names():
        stored = {
            id(tensor)
            for adapter in module.peft_config
            for tensor in get_peft_model_state_dict(module, state_dict=dict(stand_ins), adapter_name=adapter).values()
        }
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return frozenset(name for name, stand_in in stand_ins.items() if id(stand_in) in stored or name in trained)
