"""Measure wall time and memory of `zero-plugin plan` itself, with activations traced and by formula.

    python benchmarks/plan.py [--repeats 3]

Every plan runs in its own process, from a config.json that this script writes; no weight is read. The targets: traced
under 5 s for 0.9B (DeBERTa), 10 s for 7B, 15 s for 70B (Llama); by formula under 0.5 s; all under 1 GB. CPU seconds
show how much a busy machine adds to the wall time. The imports of torch and transformers are timed separately.
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

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
LLAMA_7B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
LLAMA_70B = {
    **LLAMA_7B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
MIXTRAL = {
    **LLAMA_7B,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}
DEBERTA = {
    "model_type": "deberta-v2",
    "architectures": ["DebertaV2ForSequenceClassification"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "vocab_size": 128_100,
    "relative_attention": True,
    "position_buckets": 256,
    "pos_att_type": "p2c|c2p",
    "conv_kernel_size": 3,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
MACHINES = ("--gpu", "A100-80GB", "--gpus", "8", "--host_memory", "1TiB", "--global_batch", "256")
# The model, the arguments, and the target in seconds.
WAYS = {
    "DeBERTa 0.9B, traced": (DEBERTA, ("MODEL", "--sequence_length", "128"), 5.0),
    "Llama 7B, traced": (LLAMA_7B, ("MODEL",), 10.0),
    "Llama 70B, traced": (LLAMA_70B, ("MODEL",), 15.0),
    "Mixtral 47B, traced": (MIXTRAL, ("MODEL",), 15.0),
    "Llama 7B, by formula": (LLAMA_7B, ("MODEL", "--no_trace"), 0.5),
    "--params 7B": (LLAMA_7B, ("--params", "7B"), 0.5),
}
IMPORTS = "import torch, transformers; transformers.LlamaForCausalLM, transformers.DebertaV2ForSequenceClassification"


def measure(command: list[str]) -> tuple[float, float, int]:
    """Return wall seconds, CPU seconds and the largest resident size in bytes of one command of this Python."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = process.stderr.read() if process.stderr else ""
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if os.waitstatus_to_exitcode(status) not in (0, 1):  # 1: nothing fits
        raise SystemExit(said)
    return wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions, of which the fastest counts (default 3)")
    repeats = parser.parse_args().repeats
    print(f"{'plan of':26}{'wall':>8}{'CPU':>8}{'memory':>9}   target")
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, given, target) in WAYS.items():
            (Path(folder) / "config.json").write_text(json.dumps(config))
            words = [folder if word == "MODEL" else word for word in given]
            command = ["-m", "zero_plugin", "plan", *words, *MACHINES]
            wall, cpu, memory = min(measure(command) for _ in range(repeats))
            print(f"{name:26}{wall:7.2f}s{cpu:7.2f}s{memory / 1e6:6.0f} MB   {target:g} s, 1000 MB", flush=True)
    wall, cpu, memory = min(measure(["-c", IMPORTS]) for _ in range(repeats))
    print(f"{'the imports alone':26}{wall:7.2f}s{cpu:7.2f}s{memory / 1e6:6.0f} MB")


if __name__ == "__main__":
    main()
