"""Exceptions for the tested pages, row by row: what cannot run and why, and what is typed differently.

A block is named by its page and the start of its first line, a command by its page and its start. A row that matches
nothing fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

Row = tuple[str, str]
Value = TypeVar("Value")

# Blocks that do not run here, with the reason: at most a tenth of all.
CANNOT_RUN: dict[Row, str] = {
    ("README.md", "make demo"): ("installs from PyPI, and runs the suite that this test is a part of"),
    ("README.md", "python -m venv"): "installs torch and DeepSpeed from PyPI",
    ("docs/launchers.md", "import ray.train"): "needs Ray: tests/launch/test_ray.py runs it where Ray is installed",
    ("docs/launchers.md", "mpirun -n 2"): "needs MPI, and two machines: tests/launch/test_schedulers.py runs mpirun",
    ("docs/launching.md", "zero-plugin launch --deepspeed_hostfile"): (
        "needs hosts that ssh reaches; tests/launch/test_hostfile.py starts an ssh server for that"
    ),
    ("docs/tutorial/from-lightning.md", "from lightning.pytorch import Trainer"): "needs Lightning, and GPUs",
    ("docs/launching.md", "zero-plugin launch --tpu"): (
        "needs a TPU, or torch_xla, which is in another environment: tests/xla"
    ),
}

# Blocks that another test compares with their output.
COMPARED_ELSEWHERE: dict[Row, str] = {
    ("docs/architecture.md", "Makefile  constraints.txt"): (
        "test_docs.py::test_tree_lists_packages_and_top_modules_with_the_sentence_of_their_docstring"
    ),
    ("docs/training.md", "zero_plugin: saving checkpoint_3"): (
        "test_messages.py::test_the_page_shows_the_lines_of_a_long_save"
    ),
    **{
        (f"docs/recipes/{name}.md", "$ zero-plugin launch"): "test_recipes.py::test_it_trains"
        for name in ("lora", "full-8b", "offload-70b", "long-samples", "rl")
    },
}

# Exit codes other than 0 that the pages mention.
EXIT_CODES: dict[Row, int] = {
    ("docs/configuration.md", "zero-plugin check wrong.yaml"): 2,
}

# Arguments appended to commands that would take minutes as printed.
SHORTER: dict[Row, str] = {
    ("docs/demo.md", "zero-plugin demo --zero_stage 3"): " -- --steps 2 --sample 8",
    ("docs/demo.md", "zero-plugin demo --config"): " -- --steps 2 --sample 8",
    ("docs/demo.md", "zero-plugin demo -- --steps 2000"): " --steps 2 --sample 8",
}

# Commands that only the campaign runs to their end. Daily, launches are typed with --dry_run and the others not at all,
# because the command's own tests cover them.
CAMPAIGN: set[Row] = {
    ("README.md", "zero-plugin launch --num_processes 2 --config_file ds.json"),
    ("README.md", "zero-plugin launch --config zero2 --zero_stage 3"),
    ("README.md", "zero-plugin launch --zero_stage 2"),
    ("README.md", "zero-plugin launch --config_file my.yaml"),
    ("README.md", "zero-plugin test"),
    ("docs/checkpoints.md", "zero-plugin checkpoint export"),
    ("docs/checkpoints.md", "zero-plugin checkpoint import"),
    ("docs/planning.md", "zero-plugin plan path/to/model"),
    ("docs/planning.md", "zero-plugin plan blog_models"),
    ("docs/recipes/lora.md", "zero-plugin plan"),
    ("docs/recipes/long-samples.md", "zero-plugin plan"),
    ("docs/recipes/rl.md", "zero-plugin plan"),
    ("docs/demo.md", "zero-plugin demo --zero_stage 3"),
    ("docs/demo.md", "zero-plugin demo --config"),
    ("docs/demo.md", "zero-plugin demo -- --steps 2000"),
    ("docs/launching.md", "zero-plugin launch --num_machines 2 --machine_rank 0"),
    ("docs/launching.md", "zero-plugin launch --num_machines 2 --rdzv_backend"),
    ("docs/launching.md", "zero-plugin launch --num_processes 2 --num_machines 2"),
    ("docs/launchers.md", "torchrun"),
    ("docs/launchers.md", "srun"),
    ("docs/tutorial/from-pytorch.md", "zero-plugin launch --config zero3"),
    ("docs/tutorial/from-trainer.md", "zero-plugin launch --zero_stage 2"),
    ("docs/troubleshooting.md", "zero-plugin test"),
}

# Commands that are typed on two machines together: the text for the second one. See bin/on-two-machines.
SECOND_MACHINE: dict[Row, tuple[str, str]] = {
    ("docs/launching.md", "zero-plugin launch --num_machines 2 --machine_rank 0"): (
        "--machine_rank 0",
        "--machine_rank 1",
    ),
    ("docs/launching.md", "zero-plugin launch --num_machines 2 --rdzv_backend"): ("", ""),
    ("docs/launching.md", "zero-plugin launch --num_processes 2 --num_machines 2"): ("", ""),
}

# Commands that run until they are interrupted.
ENDLESS: set[Row] = {("docs/launching.md", 'python -c "import signal;')}

# What a block's text assumes: Python that runs before the block, with the page's variables. README's files are in the
# folder of each other page.
_README = 'exec(open("train.py").read())\n'
# This process continues, and blocks the page's other jobs from saving in its folder.
_README_APART = _README.replace("read()", 'read().replace("out/last", "own/last")')
BEFORE: dict[Row, str] = {
    ("docs/big-models.md", "from transformers import AutoConfig"): """
from transformers import AutoModelForCausalLM, GPT2Config
config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
AutoModelForCausalLM.from_config(config).save_pretrained("path/to/checkpoint")
""",
    ("docs/checkpoints.md", "accelerator.save_state("): """
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from zero_plugin import Accelerator
config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
GPT2LMHeadModel(config).save_pretrained("folder")
accelerator = Accelerator(config="zero2")
model = GPT2LMHeadModel(config)
ids = torch.randint(64, (8, 16))
loader = DataLoader(TensorDataset(ids), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for (batch,) in loader:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
""",
    ("docs/checkpoints.md", "zero-plugin checkpoint inspect"): 'model.save_checkpoint("deepspeed_folder")',
    (
        "docs/configuration.md",
        "from zero_plugin import DummyOptim, DummyScheduler",
    ): "import torch\nmodel = torch.nn.Linear(2, 2)",
    ("docs/demo.md", "accelerator = Accelerator()"): """
import sys
sys.argv = ["train.py", "--steps", "2", "--sample", "8", "--width", "16", "--batch_size", "64"]
from zero_plugin.demo.train import *
from zero_plugin.demo.train import AdamW, DataLoader, Accelerator, OneCycleLR, Progress
from zero_plugin.demo.train import asdict, islice, json, repeat, set_seed, torch
args = read_arguments()
train_text, held_out_text = read_text(max_bytes=100_000, held_out_bytes=20_000)
config = GPTConfig(hidden_size=args.width, layers=args.layers, heads=args.heads, block=args.block)
held_out = DataLoader(Blocks(held_out_text, args.block), args.batch_size)
updates = args.steps
losses, rates, progress = torch.zeros(args.steps), [], Progress(total=args.steps).__enter__()
""",
    ("docs/demo.md", "nats = ["): 'prompt = torch.tensor([list(b"def ")])',
    ("docs/demo.md", "accelerator.end_training()"): """
(args.output / "model" / "config.json").write_text(json.dumps(asdict(config)))
""",
    ("docs/long-context.md", "from torch.optim import AdamW"): """
import torch
from transformers import LlamaConfig
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, bos_token_id=0
)
samples = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4)]
""",
    ("docs/launching.md", "from zero_plugin import notebook_launcher"): """
def train(name, epochs):
    from zero_plugin import Accelerator
    assert Accelerator().num_processes == 2 and (name, epochs) == ("gpt", 3)
model_name = "gpt"
""",
    ("docs/launching.md", "resumed = accelerator.resume()"): f"""
from zero_plugin import Accelerator, ProjectConfiguration
epochs = 2
{_README_APART}
accelerator.project_configuration.automatic_checkpoint_naming = True
accelerator.project_configuration.set_directories("project")
""",
    ("docs/planning.md", "zero-plugin plan --params 7B"): """
import json, pathlib
pathlib.Path("path/to/model").mkdir(parents=True)
sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
pathlib.Path("path/to/model/config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
""",
    ("docs/planning.md", "zero-plugin plan blog_models"): f"""
import shutil
shutil.copy({str(Path(__file__).parents[2] / "benchmarks" / "blog_models.py")!r}, ".")
""",
    **dict.fromkeys(
        [("docs/recipes/long-samples.md", '"""Train a'), ("docs/recipes/rl.md", '"""Train a')],
        """
import pathlib
from pages import ROOT, blocks_of
(shown,) = [block for block in blocks_of(ROOT / "docs/recipes/lora.md") if block.language == "json"]
for model in ("llama-3-8b", "llama-3.1-8b"):
    pathlib.Path(model).mkdir()
    pathlib.Path(model, "config.json").write_text(shown.text)
""",
    ),
    ("docs/training.md", "generator, critic,"): """
import torch
from torch.utils.data import DataLoader, TensorDataset
from zero_plugin import Accelerator
accelerator = Accelerator()
generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
g_optimizer, c_optimizer = (torch.optim.AdamW(model.parameters()) for model in (generator, critic))
loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
""",
    ("docs/training.md", "from zero_plugin import Progress"): f"""
{_README}
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32))
loader = [{{"input_ids": torch.ones(2, 3, dtype=torch.long)}}]
""",
    ("docs/training.md", "accelerator = Accelerator(log_with="): """
loss, tokens, step = torch.ones(()), 8, 1
""",
}


def find_row(table: dict[Row, Value], page: str, command: str, otherwise: Value) -> Value:
    """Return the value of the row for a command of a page."""
    return next(
        (value for (where, begins), value in table.items() if where == page and command.startswith(begins)), otherwise
    )


def has_row(table: set[Row], page: str, command: str) -> bool:
    """Return whether a command of a page has a row."""
    return any(where == page and command.startswith(begins) for where, begins in table)
