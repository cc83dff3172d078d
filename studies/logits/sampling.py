"""Number of tokens needed to estimate the force between logits, and number of steps for which it stays valid.

    python -m studies.logits.sampling --data europarl --models FOLDER ... --out results/logits/sampling.md

Needs `train.en.xz` and `valid.en.xz` in `--data`; each FOLDER is a transformers model with its tokenizer. Compares, by
the cosine in each layer, the force from few tokens with that from 8,192, and the force during the training of a
language model with the force some steps later.
"""

from __future__ import annotations

import argparse
import lzma
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from repulsive import SVGD, repel
from repulsive.lab.systems.lm.model import Decoder, DecoderConfig
from repulsive.repulsion.logits.force import LayerForce, logit_forces
from repulsive.safety.markdown import format_table

REFERENCE = 8192
COUNTS = (128, 256, 512, 1024, 2048)
LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="folders of transformers models")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the language model")
    parser.add_argument("--seeds", type=int, default=5, help="samples for each number of tokens")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for folder in options.models:
        rows.append(_compare_samples(folder.name, *_pretrained(folder, options.data), options.seeds))
        print(*rows[-1], sep=", ", flush=True)
    model, batches = _language_model(options.data)
    example = {"tokens": next(batches)[0]}
    rows.append(_compare_samples("byte LM, untrained", model, example, options.seeds))
    ages = _compare_ages(model, batches, options.steps)
    rows.append(_compare_samples(f"byte LM, after {options.steps} steps", model, example, options.seeds))
    text = "\n\n".join([format_table(["model", *(f"{n} tokens" for n in COUNTS)], rows), ages])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def _compare_samples(name: str, model: nn.Module, inputs: dict[str, Tensor], seeds: int) -> list[str]:
    """Cosine with the force of all tokens: mean over layers and samples, and mean of the worst layer."""
    reference = _forces(model, inputs, REFERENCE, 0)
    cells = []
    for count in COUNTS:
        samples = [_cosines(_forces(model, inputs, count, seed), reference) for seed in range(seeds)]
        layers = [statistics.fmean(values) for values in zip(*samples, strict=True)]
        cells.append(f"{statistics.fmean(layers):.3f} (worst {min(layers):.3f})")
    return [name, *cells]


def _forces(model: nn.Module, inputs: dict[str, Tensor], tokens: int, seed: int) -> dict[int, LayerForce]:
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    rule = SVGD(space="logits", tokens=tokens)
    handle = repel(model, optimizer, rule, seed=seed, verbose=False)
    model(**inputs)
    source = handle._logits
    assert source is not None
    forces = logit_forces(source.layers, source.sampler.samples, rule)
    optimizer.zero_grad()
    source.remove()
    handle._hooks.remove()
    return forces


def _cosines(one: dict[int, LayerForce], other: dict[int, LayerForce]) -> list[float]:
    """Cosine of two forces, for each layer."""
    pairs = zip(one.values(), other.values(), strict=True)
    flat = [[torch.cat([t.flatten() for part in force.parts for t in part]) for force in pair] for pair in pairs]
    return [float(torch.cosine_similarity(a, b, dim=0)) for a, b in flat]


def _pretrained(folder: Path, data: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with lzma.open(data / "valid.en.xz", "rt") as file:
        words = file.read().replace("\n", " ")
    ids = tokenizer(words[: REFERENCE * 12], return_tensors="pt", truncation=False)["input_ids"][0]
    rows = REFERENCE // LENGTH
    return model, {"input_ids": ids[: rows * LENGTH].view(rows, LENGTH)}


def _language_model(data: Path):
    """The small decoder of the study, and its batches of bytes."""
    with lzma.open(data / "train.en.xz") as file:
        text = torch.frombuffer(bytearray(file.read(8_000_000)), dtype=torch.uint8)
    model = Decoder(DecoderConfig(vocabulary=256, width=128, heads=4, layers=4))

    def batches():
        generator = torch.Generator().manual_seed(0)
        first = True
        while True:
            rows = REFERENCE // LENGTH if first else 16
            starts = torch.randint(len(text) - LENGTH - 1, (rows,), generator=generator)
            window = text[starts[:, None] + torch.arange(LENGTH + 1)].long()
            first = False
            yield window[:, :-1], window[:, 1:]

    return model, batches()


def _compare_ages(model: nn.Module, batches, steps: int) -> str:
    """Train with a new force in every step, and format the cosines between forces some steps apart."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    handle = repel(model, optimizer, SVGD(space="logits", tokens=1024, every=1), verbose=False)
    source = handle._logits
    assert source is not None
    kept: list[list[Tensor]] = []
    for step in range(steps):
        for entry in optimizer.param_groups:
            entry["lr"] = 2e-3 * min(1, (step + 1) / 50)
        tokens, targets = next(batches)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append([torch.cat([w.force.flatten() for side in h.sides for w in side]) for h in source.held.values()])
        if step % 50 == 0:
            print(f"step {step} loss {float(loss):.3f}", flush=True)
    handle.remove()
    ages = (1, 2, 5, 10, 20)
    rows = []
    for begin, end in ((0, 20), (20, 50), (50, 150), (150, steps)):
        cells = []
        for age in ages:
            pairs = [(kept[t], kept[t + age]) for t in range(begin, min(end, steps - age))]
            values = [float(torch.cosine_similarity(a, b, dim=0)) for x, y in pairs for a, b in zip(x, y, strict=True)]
            cells.append(f"{statistics.fmean(values):.3f}" if values else "-")
        rows.append([f"{begin} to {end}", *cells])
    return format_table(["steps", *(f"{age} steps old" for age in ages)], rows)


if __name__ == "__main__":
    main()
