"""sentence-transformers' Trainer on a tiny BERT learns to make pairs of sentences dissimilar."""

import os

from data_of_words import ROWS, WORDS, tokenizer
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CosineSimilarityLoss
from sentence_transformers.models import Pooling, Transformer
from trainer import arguments, report
from transformers import BertConfig, BertModel, set_seed

if __name__ == "__main__":
    set_seed(0)
    size = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    folder = f"bert-{os.environ.get('RANK', '0')}"  # of this process: the others write at the same time
    BertModel(size).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words = Transformer(folder, max_seq_length=16)
    model = SentenceTransformer(modules=[words, Pooling(32)], device="cpu")
    given = {name: getattr(arguments(), name) for name in ("max_steps", "per_device_train_batch_size")}
    config = SentenceTransformerTrainingArguments(
        **given,
        output_dir="trained",
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    rows = Dataset.from_dict(
        {
            "first": ROWS,
            "second": [ROWS[(7 * place) % 48] for place in range(48)],
            "score": [0.0] * 48,
        }
    )
    trainer = SentenceTransformerTrainer(model=model, args=config, train_dataset=rows, loss=CosineSimilarityLoss(model))
    trainer.train()
    report(trainer)
