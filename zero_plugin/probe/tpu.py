"""Whether this machine has a TPU, told without torch and without waking it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["PJRT_DEVICE", "find_tpu"]

PJRT_DEVICE: Final = "PJRT_DEVICE"  # by it torch_xla is told which runtime to load
_GOOGLE: Final = "0x1ae0"  # PCI vendor; as torch_xla 2.9 looks for chips, in torch_xla/_internal/tpu.py
_CHIPS: Final = frozenset(("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"))  # v2/v3 v4 v5p v5e v6e v7x
# A container may hide the PCI bus. Both folders of devices are others' too, so a variable has to say TPU as well.
_NODES: Final = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
_VARIABLES: Final = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_NAME", "COLAB_TPU_ADDR")


def find_tpu(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """By what a TPU is seen here, in half a sentence; "" where there is none, or where `PJRT_DEVICE` names another.

    Args:
        environ: this process's environment.
        root: the file system's root.
    """
    chosen = environ.get(PJRT_DEVICE, "")
    if chosen:
        return f"{PJRT_DEVICE} is {chosen}" if chosen.partition("_")[0] == "TPU" else ""
    if chips := sum(1 for _ in _chips(root)):
        return f"{chips} TPU chip{'s' if chips > 1 else ''} on the PCI bus"
    node = next((path for pattern in _NODES for path in sorted(root.glob(pattern))), None)
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    return f"{node} is there and {variable} is set" if node is not None and variable is not None else ""


def _chips(root: Path) -> Iterator[Path]:
    for folder in root.glob("sys/bus/pci/devices/*"):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and device in _CHIPS:
            yield folder
