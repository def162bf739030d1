"""TRL's SFTTrainer on a tiny GPT-2, with a tokenizer of its own words."""

from data_of_words import ROWS, tokenizer
from datasets import Dataset
from trainer import arguments, report, tiny_gpt2
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    given = {name: getattr(arguments(), name) for name in ("learning_rate", "max_steps", "per_device_train_batch_size")}
    config = SFTConfig(
        **given,
        output_dir="trained",
        max_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    )
    rows = Dataset.from_dict({"text": ROWS})
    trainer = SFTTrainer(tiny_gpt2(), config, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    report(trainer)
