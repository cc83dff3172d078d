"""How many tokens a force needs, and for how many steps it stays good.

    python -m studies.logits.sampling --data europarl --models FOLDER ... --out results/logits/sampling.md

`--data` holds `train.en.xz` and `valid.en.xz`; each FOLDER is a transformers model with its tokenizer. The force of few
tokens is compared with that of 8,192 by their cosine, layer by layer; the force of a language model in training with
the one that it has some steps later.
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

REFERENCE = 8192
COUNTS = (128, 256, 512, 1024, 2048)
LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=300, help="training steps of the language model")
    parser.add_argument("--seeds", type=int, default=5, help="samples of each number of tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = ["| model | " + " | ".join(f"{n} tokens" for n in COUNTS) + " |", "| --- " * (len(COUNTS) + 1) + "|"]
    for folder in options.models:
        lines.append(_row(folder.name, *_pretrained(folder, options.data), options.seeds))
        print(lines[-1], flush=True)
    model, batches = _language_model(options.data)
    example = {"tokens": next(batches)[0]}
    lines.append(_row("byte LM, untrained", model, example, options.seeds))
    reuse = _reuse(model, batches, options.steps)
    lines.append(_row(f"byte LM, after {options.steps} steps", model, example, options.seeds))
    text = "\n".join([*lines, "", *reuse])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def _row(name: str, model: nn.Module, inputs: dict[str, Tensor], seeds: int) -> str:
    """Mean over layers and samples, and the worst layer's mean, of the cosine with the force of all tokens."""
    reference = _forces(model, inputs, REFERENCE, 0)
    cells = []
    for count in COUNTS:
        found = [_cosines(_forces(model, inputs, count, seed), reference) for seed in range(seeds)]
        layers = [statistics.fmean(values) for values in zip(*found, strict=True)]
        cells.append(f"{statistics.fmean(layers):.3f} (worst {min(layers):.3f})")
    return f"| {name} | " + " | ".join(cells) + " |"


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
    for hook in handle._hooks:
        hook.remove()
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


def _reuse(model: nn.Module, batches, steps: int) -> list[str]:
    """Train with a force that is new in every step, and compare forces some steps apart."""
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
    lines = ["| steps | " + " | ".join(f"{age} steps old" for age in ages) + " |", "| --- " * (len(ages) + 1) + "|"]
    for begin, end in ((0, 20), (20, 50), (50, 150), (150, steps)):
        cells = []
        for age in ages:
            pairs = [(kept[t], kept[t + age]) for t in range(begin, min(end, steps - age))]
            values = [float(torch.cosine_similarity(a, b, dim=0)) for x, y in pairs for a, b in zip(x, y, strict=True)]
            cells.append(f"{statistics.fmean(values):.3f}" if values else "-")
        lines.append(f"| {begin} to {end} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
