"""Writes a model's weights as a Hugging Face model folder: every process its own ranges, no process all of them.

Or, of a model with PEFT adapters, what PEFT stores.
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
        descriptions: of the unpartitioned tensors, in the types that they are stored in.
        fragments: gives what of them this process writes, each usable until the next is taken. Their own types may
            be others.
        in_ranges: whether each process gives what is in it, and has the same descriptions; else the main process
            gives all, and the others go along where that is collective.
    """

    descriptions: list[Description]
    fragments: Callable[[], Iterator[Fragment]]
    in_ranges: bool

    def unpartitioned(self) -> Iterator[Fragment]:
        """The fragments, each an unpartitioned tensor that the main process writes; one at a time. Collective."""
        is_main = collectives.process_index() == 0
        for fragment in self.fragments():
            if not self.in_ranges:
                yield fragment
                continue
            values = collectives.gather(fragment.part_to_write())  # their order is that of the ranges
            yield replace(fragment, start=0, values=values, written=(0, values.numel() if is_main else 0))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating type that `save_model(dtype=…)` names.

    Raises:
        ConfigError: it names none.
    """
    if dtype is not None and dtype not in _NAMED:
        fix = 'write "fp32", "bf16", "fp16" or torch\'s own, or leave it out for the type that is trained in'
        raise ConfigError(
            [Problem(f"save_model(dtype={dtype!r})", "dtype", "not a type that weights are saved in", fix)]
        )
    return None if dtype is None else _NAMED[dtype]


def names_to_save(module: nn.Module, *, trainable_only: bool) -> frozenset[str]:
    """Names of the tensors to save; a shared tensor is listed under its first name.

    Args:
        module: the user's own module, whose parameters may be partitioned.
        trainable_only: save only parameters with `requires_grad`.

    Raises:
        LoopError: there are no tensors to save.
    """
    # tensors that transformers does not save, such as computed position embeddings
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
    """The weights of a prepared model, in ranges; unpartitioned where ranges cannot be taken from them.

    A parameter that is converted, or is not in memory, is taken from what the optimizer steps.

    Args:
        session: of the model.
        names: of the tensors.
        dtype: of the floating parameters; None for the type that each is trained in.

    Raises:
        CheckpointError: fp32 master weights are wanted that cannot be reached.
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
    """Unpartitioned tensors, which the main process writes.

    Args:
        module: theirs.
        tensors: gives name and tensor, one at a time, as often as it is called; it may be collective.
        dtype: as above.
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
    """The tensors with their stored dtypes, by name: buffers and quantized weights keep their dtype."""
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
    """Write `weights` into `target`, to be read by `from_pretrained` or any reader of safetensors. Collective.

    Files are written into a folder inside, and take their places when all are complete: an error on any process leaves
    a model that was in `target` as it was. Its files that the new one does not have are removed, other files stay. On
    processes that do not see the main process' folder, which is on another machine's disk then, the main process
    writes: the others send it one tensor after another.

    Args:
        weights: what is written.
        target: made if it is missing.
        max_shard_bytes: of one file; a larger tensor has a file to itself.
        tied: name → the name whose tensor it shares. Only the latter is stored; the file's metadata keep the pair, as
            the safetensors library does.
        notes: further metadata of the files.
        write_more: called on the main process with the folder that takes further files.

    Raises:
        CheckpointError: on every process, where one cannot write.
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
                f"save_model: {target} is on no file system that all processes share, so the main process writes alone"
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
    """Copies in CPU memory, in the types that are stored, on the main process; for what is small. Collective."""
    types = {description.name: description.dtype for description in weights.descriptions}
    is_main = collectives.process_index() == 0
    return {
        fragment.name: fragment.values.reshape(fragment.shape).to("cpu", types[fragment.name], copy=True)
        for fragment in weights.unpartitioned()
        if is_main
    }


def _write(draft: Path, fragments: Iterator[Fragment], layout: Layout, progress: Callable[[int], None]) -> str:
    """What this process wrote, as `write_fragments` returns it."""
    try:
        return write_fragments(draft, [(fragments, layout)], progress)
    except Exception:
        for _ in fragments:  # to the last: other processes may be sending theirs
            pass
        raise


def _complete(
    draft: Path, target: Path, layout: Layout, written: Sequence[str | None], write_more: Callable[[Path], None]
) -> None:
    complete_pieces([layout], written)  # every byte is there
    write_more(draft)
    names = [path.name for path in sorted(draft.iterdir()) if not path.name.startswith(".")]
    for name in names:
        sync(draft / name)  # what `write_more` wrote too
    _publish(draft, target, names)


def _publish(draft: Path, target: Path, names: list[str]) -> None:
    """Give complete files their places. A reader sees the old model's weights or the new one's, never a mixture."""
    names.sort(key=lambda name: name == INDEX_NAME)  # after its shards
    old = {path.name for path in target.iterdir() if is_weight_file(path.name)}
    if INDEX_NAME in old and len(old.intersection(names)) > 1:
        # As many shards as before, under the same names: without its index, a half-renamed set is no model.
        (target / INDEX_NAME).unlink()
    for name in names:
        (draft / name).replace(target / name)
    for name in sorted(old.difference(names), key=lambda name: name != INDEX_NAME):  # the index before its shards
        (target / name).unlink(missing_ok=True)
    sync(target)


def has_adapters(module: nn.Module) -> bool:
    """Whether PEFT adapters are trained on it: a PeftModel, or a transformers model with `add_adapter`."""
    return "peft" in sys.modules and bool(getattr(module, "peft_config", None))


def adapter_names(module: Any) -> frozenset[str]:
    """Names of the tensors that PEFT stores for all adapters of `module`, and of all others that are trained.

    PEFT itself is asked, with stand-ins that hold no data, so that nothing is gathered. It may ask the Hub for the base
    model's configuration: two processes need not get the same answer.
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
