"""PEFT's LoRA on a tiny GPT-2, trained by transformers' Trainer."""

from peft import LoraConfig, get_peft_model
from trainer import arguments, report, samples, tiny_gpt2
from transformers import Trainer

if __name__ == "__main__":
    adapters = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.0, task_type="CAUSAL_LM")
    trainer = Trainer(get_peft_model(tiny_gpt2(), adapters), arguments(), train_dataset=samples())
    trainer.train()
    report(trainer)
