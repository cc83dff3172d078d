"""Train a tiny Transformer with and without repulsion and compare its heads. Takes a few seconds on a CPU.

    python examples/quickstart.py

The task: the input is a sequence of (letter, digit) pairs and then one of the letters; the answer is its digit. The
task needs attention and is learned in a few hundred steps.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from repulsive import SVGD, describe, find_heads, repel

LETTERS, DIGITS, PAIRS, WIDTH, HEADS = 8, 8, 4, 32, 4

RULES = {
    "plain": None,
    "control: SVGD(alpha=0)": SVGD(stepsize=0.1, alpha=0.0),
    "published: SVGD(alpha=0.01)": SVGD(stepsize=0.1, alpha=0.01),
    # Three times the default ratio of 0.01: heads then spread within the few steps of an example.
    "sphere, no smoothing": SVGD(stepsize=0.1, alpha="auto", ratio=0.03, space="sphere", smoothing=0),
}


class Recall(nn.Module):
    """Embed the pairs, apply one Transformer layer, and classify at the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(LETTERS, WIDTH)
        self.digit = nn.Embedding(DIGITS + 1, WIDTH)  # the last id marks the question
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.answer = nn.Linear(WIDTH, DIGITS)

    def forward(self, letters: Tensor, digits: Tensor) -> Tensor:
        hidden = self.layers(self.letter(letters) + self.digit(digits))  # [B, T, WIDTH]
        return self.answer(hidden[:, -1])  # [B, DIGITS]


def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw letters [B, T], digits [B, T] and answers [B]."""
    letters = torch.rand(count, LETTERS, generator=generator).argsort(dim=1)[:, :PAIRS]  # all different
    digits = torch.randint(DIGITS, (count, PAIRS), generator=generator)
    question = torch.randint(PAIRS, (count, 1), generator=generator)
    letters = torch.cat([letters, letters.gather(1, question)], dim=1)
    return letters, torch.cat([digits, torch.full((count, 1), DIGITS)], dim=1), digits.gather(1, question).squeeze(1)


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups; the minimum for M heads is -1 / (M - 1)."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        cosines = unit @ unit.T
        values.append(cosines[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def mean_norm(model: nn.Module) -> float:
    return float(torch.stack([group.read().norm(dim=1).mean() for group in find_heads(model)]).mean())


def train(rule: SVGD | None, steps: int, seed: int) -> tuple[float, float, float, float]:
    """Return the loss on new data, the mean cosine after a third of the steps and at the end, and the mean norm."""
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    repel(model, optimizer, rule=rule, verbose=False)
    early = mean_cosine(model)
    for step in range(steps):
        letters, digits, answers = sample(128, data)
        loss = nn.functional.cross_entropy(model(letters, digits), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 == steps // 3:
            early = mean_cosine(model)
    with torch.no_grad():
        letters, digits, answers = sample(2048, torch.Generator().manual_seed(seed + 1))
        loss = nn.functional.cross_entropy(model(letters, digits), answers)
    return float(loss), early, mean_cosine(model), mean_norm(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads are slower for such small tensors
    print(describe(find_heads(Recall())), end="\n\n")
    print(f"{'rule':30} {'loss':>7} {'early cosine':>13} {'cosine':>7} {'norm of a head':>15}")
    for name, rule in RULES.items():
        loss, early, cosine, norm = train(rule, options.steps, options.seed)
        print(f"{name:30} {loss:7.3f} {early:13.3f} {cosine:7.3f} {norm:15.2f}")
    print(
        f"Cosine: mean between two heads. The minimum for {HEADS} heads is {-1 / (HEADS - 1):.3f}.\n"
        "Smoothing (the control) makes heads more similar, repulsion less. Results on real tasks may differ."
    )


if __name__ == "__main__":
    main()
