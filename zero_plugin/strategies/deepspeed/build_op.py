"""`python -m zero_plugin.strategies.deepspeed.build_op NAME`: compile one DeepSpeed op under torch's build lock."""

from __future__ import annotations

import sys

from deepspeed.accelerator import get_accelerator

_BUILDERS = {
    "async_io": "AsyncIO",
    "cpu_adagrad": "CPUAdagrad",
    "cpu_adam": "CPUAdam",
    "cpu_lion": "CPULion",
    "fused_adam": "FusedAdam",
    "fused_lamb": "FusedLamb",
    "fused_lion": "FusedLion",
    "pin_memory": "PinMemory",
    "quantizer": "Quantizer",
}


def main(name: str) -> None:
    """Compile an op and load it.

    Args:
        name: the op's name in its builder, e.g. `cpu_adam`.
    """
    get_accelerator().create_op_builder(f"{_BUILDERS[name]}Builder").load(verbose=True)


if __name__ == "__main__":
    main(sys.argv[1])
