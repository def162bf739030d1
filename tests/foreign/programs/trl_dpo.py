"""TRL's DPOTrainer on a tiny GPT-2 and its reference."""

from data_of_words import ROWS, tokenizer
from datasets import Dataset
from trainer import arguments, report, tiny_gpt2
from trl import DPOConfig, DPOTrainer

if __name__ == "__main__":
    given = {name: getattr(arguments(), name) for name in ("learning_rate", "max_steps", "per_device_train_batch_size")}
    config = DPOConfig(
        **given,
        output_dir="trained",
        max_length=32,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    )
    halves = [row.split(maxsplit=2) for row in ROWS]
    rows = Dataset.from_dict(
        {
            "prompt": [" ".join(half[:2]) for half in halves],
            "chosen": [" " + half[2] for half in halves],
            "rejected": [" " + " ".join(reversed(half[2].split())) for half in halves],
        }
    )
    trainer = DPOTrainer(tiny_gpt2(), tiny_gpt2(), config, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    report(trainer)
