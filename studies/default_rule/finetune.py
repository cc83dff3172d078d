"""Is the default rule safe in fine-tuning? Fine-tune a trained BERT plain, on the sphere and in logits, many seeds.

    python -m studies.default_rule.finetune prepare --model FOLDER --glue FOLDER --out carry/finetune
    python -m studies.default_rule.finetune train --data carry/finetune --seeds 10 --jobs 10 --out finetune.jsonl

`prepare` tokenises SST-2 and QQP, keeps the embeddings of the tokens that occur, and stores weights as float16, so that
everything is small enough to be copied to another machine. `train` writes one JSON line per run: the loss and accuracy
on held-out items, and the norm of q and k of all heads before and after. `studies.default_rule.tables` compares them.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 64
TRAIN, HELD_OUT = 16_000, 8_000
BATCH, RATE, WARMUP = 32, 1e-4, 0.1
TASKS = {
    "sst-2": ("SST-2/train.tsv.xz", ("sentence",), "label"),
    "qqp": ("QQP/train_subset.tsv.xz", ("question1", "question2"), "is_duplicate"),
}
RULES = ("plain", "sphere", "logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare", help="tokenise the tasks, and store a small copy of the model")
    prepare.add_argument("--model", type=Path, required=True, help="folder of a BERT with its tokenizer")
    prepare.add_argument("--glue", type=Path, required=True, help="folder of the GLUE tasks")
    prepare.add_argument("--out", type=Path, required=True)
    train = verbs.add_parser("train", help="fine-tune every rule and seed")
    train.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    train.add_argument("--seeds", type=int, default=10)
    train.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    train.add_argument("--train", type=int, default=TRAIN, help="number of training items")
    train.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    train.add_argument("--out", type=Path, required=True, help="JSON lines file to append to")
    options = parser.parse_args()
    if options.verb == "prepare":
        _prepare(options.model, options.glue, options.out)
        return
    runs = [
        (options.data, task, rule, seed, options.train)
        for seed in range(options.seeds)
        for task in TASKS
        for rule in options.rules
    ]
    begun = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap_unordered(_run, runs):
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.perf_counter() - begun:.0f} s: {row}", flush=True)


# -- preparing ------------------------------------------------------------------------------------------------------


def _prepare(folder: Path, glue: Path, out: Path) -> None:
    from safetensors.torch import save
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    arrays: dict[str, np.ndarray] = {}
    for task, (file, columns, label) in TASKS.items():
        rows = list(_rows(glue / file))
        np.random.default_rng(0).shuffle(rows)  # type: ignore[arg-type]
        rows = rows[: TRAIN + HELD_OUT]
        texts = [tuple(row[column] for column in columns) for row in rows]
        encoded = tokenizer.encode_batch([pair if len(pair) > 1 else pair[0] for pair in texts])
        arrays[f"{task}-ids"] = np.array([one.ids for one in encoded])
        arrays[f"{task}-types"] = np.array([one.type_ids for one in encoded], dtype=np.uint8)
        arrays[f"{task}-mask"] = np.array([one.attention_mask for one in encoded], dtype=np.uint8)
        arrays[f"{task}-labels"] = np.array([int(row[label]) for row in rows], dtype=np.uint8)
    used = np.unique(np.concatenate([arrays[f"{task}-ids"].ravel() for task in TASKS]))
    for task in TASKS:
        arrays[f"{task}-ids"] = np.searchsorted(used, arrays[f"{task}-ids"]).astype(np.uint16)
    np.savez_compressed(out / "tasks.npz", **arrays)  # type: ignore[arg-type]
    config = BertConfig.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="sdpa")
    state = {name: tensor.half() for name, tensor in model.state_dict().items() if "position_ids" not in name}
    state["embeddings.word_embeddings.weight"] = state["embeddings.word_embeddings.weight"][torch.from_numpy(used)]
    weights = save({name: tensor.contiguous() for name, tensor in state.items()})
    (out / "model.safetensors").write_bytes(weights)  # readable for others, unlike save_file
    config.vocab_size = len(used)
    config.save_pretrained(out)
    print(f"{len(used):,} of {model.config.vocab_size:,} tokens occur")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if all(value is not None for value in row.values()):
                yield row


# -- training -------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A BERT encoder, dropout, and a linear layer on the mean of the tokens."""

    def __init__(self, bert: nn.Module, width: int) -> None:
        super().__init__()
        self.bert = bert
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return self.output(self.dropout((states * mask).sum(1) / mask.sum(1)))


def _run(run: tuple[Path, str, str, int, int]) -> dict[str, Any]:
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    from repulsive import SVGD, find_heads, repel

    folder, task, rule, seed, count = run
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BertConfig.from_pretrained(folder, attn_implementation="sdpa")
    bert = BertModel(config)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    bert.load_state_dict(weights, strict=False)
    model = Classifier(bert, config.hidden_size).to(device)
    data = np.load(folder / "tasks.npz", allow_pickle=False)
    columns = [
        torch.from_numpy(data[f"{task}-{name}"].astype(np.int64)).to(device) for name in ("ids", "types", "mask")
    ]
    labels = torch.from_numpy(data[f"{task}-labels"].astype(np.int64)).to(device)
    train, held_out = torch.arange(count), torch.arange(len(labels) - HELD_OUT, len(labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=device.type == "cuda")
    steps = count // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARMUP * steps), (steps - step) / (steps * (1 - WARMUP)))
    )
    groups = find_heads(model, parts="qk")
    before = _norms(groups)
    # three times the default ratio, as in results/default_rule
    sphere = SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0)
    chosen = sphere if rule == "sphere" else rule
    handle = None if rule == "plain" else repel(model, optimizer, chosen, verbose=False)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    model.train()
    for step in range(steps):
        items = train[order[step * BATCH : (step + 1) * BATCH]].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(*(column[items] for column in columns))
        F.cross_entropy(logits.float(), labels[items]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    loss, accuracy = _evaluate(model, columns, labels, held_out.to(device))
    report = [] if handle is None else handle.report()
    return {
        "task": task,
        "rule": rule,
        "seed": seed,
        "items": count,
        "loss": loss,
        "accuracy": accuracy,
        "norm": _norms(groups) / before,
        "similarity": float(np.mean([row.similarity for row in report])) if report else None,
    }


def _norms(groups: list[Any]) -> float:
    """Root mean square norm of all q and k heads."""
    squares = [part.take(part.parameter().detach()).square().sum(-1) for group in groups for part in group.slices]
    return math.sqrt(float(torch.cat([s.flatten() for s in squares]).mean()))


@torch.no_grad()
def _evaluate(model: nn.Module, columns: list[Tensor], labels: Tensor, items: Tensor) -> tuple[float, float]:
    model.eval()
    losses, right = 0.0, 0.0
    for some in items.split(1000):
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=labels.is_cuda):
            logits = model(*(column[some] for column in columns)).float()
        losses += float(F.cross_entropy(logits, labels[some], reduction="sum"))
        right += float((logits.argmax(-1) == labels[some]).sum())
    return losses / len(items), right / len(items)


if __name__ == "__main__":
    main()
