"""`zero-plugin checkpoint`: what is in a checkpoint, whether it is whole, and to and from other formats."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_plugin.checkpoint.recognise import KINDS, recognise
from zero_plugin.cli.amounts import progress_bar
from zero_plugin.cli.checkpoint_report import report
from zero_plugin.cli.checkpoint_verify import verify_all
from zero_plugin.errors import CheckpointError

__all__ = ["export", "import_", "inspect", "verify"]

_DIR = typer.Argument(metavar="DIR", help="A checkpoint, or a folder of several.", show_default=False)
_OUT = typer.Argument(metavar="OUT", help="What to write; is not there yet.", show_default=False)
_OVERWRITE = typer.Option("--overwrite", help="Replace the checkpoint or model that OUT is.")
_SHARD = typer.Option("--max_shard_size", metavar="SIZE", help="Largest size of a weight file, e.g. 5GB.")
_TRUST = typer.Option("--trust_pickle", help="Build any class that DeepSpeed's files name, which may run any code.")


class _Target(str, Enum):
    hf = "hf"
    single = "single"
    deepspeed_universal = "deepspeed_universal"


class _Type(str, Enum):
    keep = "keep"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def inspect(
    folder: Annotated[Path, _DIR],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a checkpoint holds: step, size, parameters, what wrote it, and how.

    Of a folder of several, each in a line. Of a Hugging Face folder or of one of DeepSpeed's checkpoints, what it is.
    Nothing of the tensors is read.
    """
    report(_existing(folder), tensors=tensors, as_json=as_json)


def verify(folder: Annotated[Path, _DIR]) -> None:
    """Read a checkpoint, compare it with its checksums, and name each tensor and file that differs.

    Exit code: 1 if it is damaged, 0 if not. Of a folder of several, all are read.
    """
    if not verify_all(_existing(folder)):
        raise typer.Exit(1)


def export(
    folder: Annotated[Path, _DIR],
    out: Annotated[Path, _OUT],
    to: Annotated[_Target, typer.Option("--to", help="A model folder, one .safetensors file, or for DeepSpeed.")],
    dtype: Annotated[_Type, typer.Option("--dtype", help="Of the weights; fp32 are the optimizer's.")] = _Type.keep,
    max_shard_size: Annotated[str, _SHARD] = "10GB",
    model: Annotated[
        int | None, typer.Option("--model", help="Which of several models, from 0.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, _OVERWRITE] = False,
    trust_pickle: Annotated[bool, _TRUST] = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder or one file, or all of it as DeepSpeed's universal format.

    DIR may be a checkpoint of DeepSpeed's too, or a model folder; of a folder of several, the newest whole one is read.
    It needs no GPU, and no more memory than one tensor takes.
    """
    if to is _Target.deepspeed_universal and dtype is not _Type.keep:
        raise typer.BadParameter(
            f"{dtype.value}: a universal checkpoint holds 32-bit masters; leave it out.", param_hint="--dtype"
        )
    target, source_folder = out.expanduser().absolute(), _existing(folder)

    from zero_plugin.checkpoint.convert.open_source import open_source
    from zero_plugin.checkpoint.convert.to_model import write_model, write_single_file
    from zero_plugin.checkpoint.convert.to_universal import write_universal
    from zero_plugin.checkpoint.save_model import parse_size
    from zero_plugin.checkpoint.saved_weights import parse_dtype

    source = open_source(source_folder, model=model, trust_pickle=trust_pickle)
    wanted = None if dtype is _Type.keep else parse_dtype(dtype.value)
    options: dict[str, Any] = {"overwrite": overwrite}
    with progress_bar(
        "writing", source.bytes_to_write(wanted, weights_only=to is not _Target.deepspeed_universal)
    ) as bar:
        if to is _Target.hf:
            limit = parse_size(max_shard_size)
            write_model(source, target, dtype=wanted, max_shard_bytes=limit, progress=bar, **options)
        elif to is _Target.single:
            write_single_file(source, target, dtype=wanted, progress=bar, **options)
        else:
            write_universal(source, target, progress=bar, **options)
    _tell(f"{source.folder} → {target}", source.notes)


def import_(
    source_folder: Annotated[
        Path, typer.Argument(metavar="SRC", help="A checkpoint of DeepSpeed, or a model folder.", show_default=False)
    ],
    out: Annotated[Path, _OUT],
    max_shard_size: Annotated[str, _SHARD] = "10GB",
    overwrite: Annotated[bool, _OVERWRITE] = False,
    trust_pickle: Annotated[bool, _TRUST] = False,
) -> None:
    """Make a checkpoint, which load_state goes on from on any topology, of DeepSpeed's or of a Hugging Face folder.

    Of what DeepSpeed's save_checkpoint wrote (stages 0 to 3): weights, masters, optimizer states, schedule and
    counters; its pickles are read without running any code. Of a Hugging Face folder: the weights.
    """
    target, folder = out.expanduser().absolute(), _existing(source_folder)
    if recognise(folder) in ("checkpoint", "several"):
        raise CheckpointError(f"{folder} is {KINDS['checkpoint']} already: load_state() and load_weights() take it.")

    from zero_plugin.checkpoint.convert.open_source import open_source
    from zero_plugin.checkpoint.convert.to_checkpoint import write_checkpoint
    from zero_plugin.checkpoint.save_model import parse_size

    source = open_source(folder, trust_pickle=trust_pickle)
    limit = parse_size(max_shard_size)
    with progress_bar("writing", source.bytes_to_write(None, weights_only=False)) as bar:
        write_checkpoint(source, target, max_shard_bytes=limit, overwrite=overwrite, progress=bar)
    _tell(f"{source.folder} → {target}", source.notes)


def _existing(folder: Path) -> Path:
    path = folder.expanduser().absolute()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}.\nName the folder of a checkpoint, or one that holds several.")
    return path


def _tell(line: str, notes: list[str]) -> None:
    print(line)
    for note in notes:
        print(f"not converted: {note}", file=sys.stderr)
