"""Metrics over a test set that neither batch size nor processes divide: tensors, texts and ragged rows."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object, reduce, set_seed
from torch import nn
from torch.utils.data import DataLoader

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {
    "samples_outside_the_loop": (
        (2,),
        (
            "`gather_for_metrics` where repeated samples cannot be detected: "
            "outside the loop, or of rows that are not samples"
        ),
    ),
}

SAMPLES = 37


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(4)
    x = torch.randn(SAMPLES, 4)
    data = [{"x": x[i], "label": i % 3, "text": f"sample {i}"} for i in range(SAMPLES)]
    model = accelerator.prepare_model(nn.Linear(4, 3), evaluation_mode=True)
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    model.eval()

    logits, labels, texts, lengths = [], [], [], []
    for batch in loader:
        with torch.no_grad():
            found = model(batch["x"])
        everywhere = accelerator.gather_for_metrics({"logits": found, "labels": batch["label"]})
        logits.append(everywhere["logits"])
        labels.append(everywhere["labels"])
        texts += accelerator.gather_for_metrics(batch["text"], use_gather_object=True)
        # Generated sequences differ in length between processes, so they are padded before the gather.
        longest = int(batch["label"].max()) + 1 + accelerator.process_index
        ragged = torch.full((len(batch["label"]), longest), 1 + accelerator.process_index)
        padded = accelerator.pad_across_processes(ragged, dim=1, pad_index=-100)
        gathered = accelerator.gather_for_metrics(padded)
        lengths.append([list(gathered.shape), int((gathered == -100).sum())])
    scores, truth = torch.cat(logits), torch.cat(labels)
    assert len(truth) == len(texts) == len(set(texts)) == SAMPLES
    confusion = torch.zeros(3, 3, dtype=torch.long)
    for guess, label in zip(scores.argmax(dim=1), truth, strict=True):
        confusion[label, guess] += 1

    # After the loop, of all batches together: the samples that completed the last step are no longer known.
    left = torch.cat([batch["label"] for batch in loader])
    try:
        outside = len(accelerator.gather_for_metrics(left))
    except Exception as error:  # noqa: BLE001 - the type is what differs
        outside = type(error).__name__

    rank = accelerator.process_index
    objects = gather_object([{"rank": rank, "name": f"process {rank}"}])
    named = broadcast_object_list([f"from {rank}", rank])
    tensors = {
        "sum": reduce(torch.tensor([1.0 + rank]), "sum").item(),
        "mean": accelerator.reduce(torch.tensor([1.0 + rank]), "mean").item(),
        "first": broadcast(torch.tensor([5 + rank])).item(),
    }
    if accelerator.is_main_process:
        results = {
            "losses": nn.functional.cross_entropy(scores, truth, reduction="none").tolist(),
            "accuracy": (scores.argmax(dim=1) == truth).float().mean().item(),
            "confusion": confusion.tolist(),
            "texts": texts,
            "lengths": lengths,
            "samples_outside_the_loop": outside,
            "objects": objects,
            "named": named,
            "tensors": tensors,
        }
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
