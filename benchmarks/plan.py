"""Wall time and memory of `zero-plugin plan` itself for a 7B model, with its activations traced and by formula.

    python benchmarks/plan.py [--repeats 3]

Every plan runs in a process of its own, from a config.json that is written here; no weight is read. The targets: with
tracing under 10 s, without under 0.5 s, either under 1 GB. CPU seconds tell what a busy machine adds to the wall's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
MACHINES = ("--gpu", "A100-80GB", "--gpus", "8", "--host_memory", "1TiB", "--global_batch", "256")
WAYS = {
    "config.json, traced": ("MODEL",),
    "config.json, by formula": ("MODEL", "--no_trace"),
    "--params 7B": ("--params", "7B"),
}
TARGETS = {"config.json, traced": 10.0, "config.json, by formula": 0.5, "--params 7B": 0.5}


def measure(arguments: list[str]) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and the largest resident size, in bytes, of one `zero-plugin plan`."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "zero_plugin", "plan", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = process.stderr.read() if process.stderr else ""
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) not in (0, 1):  # 1: nothing fits
        raise SystemExit(said)
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts")
    repeats = parser.parse_args().repeats
    print(f"{'model from':26}{'wall':>8}{'CPU':>8}{'memory':>9}   target")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_7B))
        for name, given in WAYS.items():
            arguments = [folder if word == "MODEL" else word for word in given]
            wall, cpu, memory = min(measure([*arguments, *MACHINES]) for _ in range(repeats))
            print(f"{name:26}{wall:7.2f}s{cpu:7.2f}s{memory / 1e6:6.0f} MB   {TARGETS[name]:g} s, 1000 MB")


if __name__ == "__main__":
    main()
