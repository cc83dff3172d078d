"""Fine-tune a sentence-transformers model with repulsion: one callback in its Trainer.

    python examples/sentence_embeddings.py

`SentenceTransformerTrainer` is a Trainer of transformers, so `RepulsiveCallback` works in it. The model is a small BERT
with mean pooling, built from its configuration. It learns to put two descriptions of the same colour and animal next
to each other, in other words and another order. Prints for each training the loss, the share of test sentences whose
nearest neighbour is their pair, and the mean cosine between heads before and after. Needs
`pip install -e ".[transformers]" sentence-transformers datasets`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from repulsive import SVGD, find_heads
from repulsive.integrations.transformers import RepulsiveCallback

COLOURS = [("red", "crimson"), ("blue", "azure"), ("green", "emerald"), ("black", "dark"), ("white", "pale")]
ANIMALS = [("dog", "hound"), ("cat", "kitten"), ("horse", "pony"), ("bird", "sparrow"), ("fish", "trout")]
PLACES = [("house", "home"), ("wood", "forest"), ("sea", "ocean"), ("field", "meadow")]
# Three times the default ratio of 0.01: heads then spread within the few steps of an example.
RULES = {"plain": None, "repulsive": SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0)}


def pairs(count: int, seed: int) -> Dataset:
    """Pairs of sentences with the same meaning; words are drawn from the synonyms."""
    source = random.Random(seed)
    meanings = list(itertools.product(COLOURS, ANIMALS, PLACES))
    rows: dict[str, list[str]] = {"anchor": [], "positive": []}
    for colour, animal, place in source.choices(meanings, k=count):
        say = lambda synonyms: source.choice(synonyms)  # noqa: E731
        rows["anchor"].append(f"a {say(colour)} {say(animal)} in the {say(place)}")
        rows["positive"].append(f"in the {say(place)} there is a {say(animal)} which is {say(colour)}")
    return Dataset.from_dict(rows)


def build(folder: Path) -> SentenceTransformer:
    """A small BERT and its tokenizer, saved to a folder and loaded as sentence-transformers does."""
    synonyms = [word for pair in (*COLOURS, *ANIMALS, *PLACES) for word in pair]
    words = ["[PAD]", "[UNK]", "a", "in", "the", "there", "is", "which", *synonyms]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device="cpu")


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def accuracy(model: SentenceTransformer) -> float:
    """Share of meanings whose two sentences are nearest neighbours among all meanings."""
    meanings = list(itertools.product(COLOURS, ANIMALS, PLACES))
    first = [f"a {c[0]} {a[0]} in the {p[0]}" for c, a, p in meanings]
    second = [f"in the {p[1]} there is a {a[1]} which is {c[1]}" for c, a, p in meanings]
    one, other = (
        nn.functional.normalize(model.encode(lines, convert_to_tensor=True), dim=1) for lines in (first, second)
    )
    return float(((one @ other.T).argmax(1) == torch.arange(len(meanings))).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    for name, rule in RULES.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            model = build(Path(folder))
            before = mean_cosine(model)
            arguments = SentenceTransformerTrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=32,
                learning_rate=3e-3,
                logging_steps=steps,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer = SentenceTransformerTrainer(
                model,
                arguments,
                train_dataset=pairs(2000, seed=1),
                loss=MultipleNegativesRankingLoss(model),
                callbacks=[RepulsiveCallback(rule, verbose=False)],
            )
            loss = trainer.train().training_loss
        heads = f"mean cosine between heads {before:+.3f} -> {mean_cosine(model):+.3f}"
        print(f"{name:10} loss {loss:.3f}  accuracy {accuracy(model):.3f}  {heads}", flush=True)


if __name__ == "__main__":
    main()
