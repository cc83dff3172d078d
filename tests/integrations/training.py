"""Small models, data and a training step written by hand, shared by the tests of the integrations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from repulsive import SPOS, SVGD, find_heads
from repulsive.particles.rule import Rule
from repulsive.repulsion import Linear

# Both depend on the step, SVGD by its schedule and SPOS by its noise: a resumed run with the wrong step differs.
RULES = {
    "svgd": SVGD(alpha="auto", ratio=Linear(0.1, 1.0, 6)),
    "spos": SPOS(alpha="auto", ratio=0.3, beta=1e6),
}
# Forces are in use for several steps, of which a checkpoint is one.
LOGITS = SVGD("heads", 0.3, space="logits", tokens=32, every=5)
TOKENS, LENGTH = 12, 7


class Encoder(nn.Module):
    """One attention layer and a classifier, without dropout, so that runs are reproducible."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.answer = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.answer(self.layer(self.embed(tokens)).mean(1))  # [B, 2]


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


def labelled(count: int) -> TensorDataset:
    """Random sequences [N, T]; the label is 1 if token 0 occurs."""
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens, (tokens == 0).any(1).long())


def llama() -> nn.Module:
    """A Llama with two layers, each with four query heads and two key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_dropout=0.0,
        )
    )


class Copies(Dataset[dict[str, Tensor]]):
    """Sequences of four random tokens followed by the same four."""

    def __init__(self, count: int) -> None:
        words = torch.randint(TOKENS, (count, 4), generator=torch.Generator().manual_seed(1))
        self.ids = torch.cat([words, words], dim=1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def step_by_hand(model: nn.Module, optimizer: Optimizer, rule: Rule, order: str, max_norm: float) -> None:
    """Clip, repel and step without `repel`, with the rule's `gradient` group by group."""
    if order == "clip-repel":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in find_heads(model):
        (part,) = group.slices
        grad = part.parameter().grad
        assert grad is not None
        part.put(grad, rule.gradient(group.read(), part.take(grad)))
    if order == "repel-clip":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])
