"""Sentences of few words, and a tokenizer with exactly these words. Not a program."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "<end>",
    "<unknown>",
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "red",
    "blue",
    "small",
    "old",
    "tree",
    "house",
    "river",
    "and",
    "not",
]
ROWS = [
    " ".join(["the", WORDS[4 + i % 3], WORDS[7 + i % 3], "the", WORDS[10 + i % 4], WORDS[14 + i % 3], "and", "not"])
    for i in range(48)
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one word per number. GPT-2 in trainer.py has 32."""
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<end>", bos_token="<end>", unk_token="<unknown>"
    )
