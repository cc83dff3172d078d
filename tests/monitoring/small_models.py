"""Small models to monitor, and their training."""

import torch
from torch import nn

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def bert(**settings):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=64, **settings)).train()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def inputs(step=0):
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "attention_mask": MASK, "labels": ids}


def loss_of(model, step):
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(step))).square().mean()
    return model(**inputs(step)).loss


def train(model, monitor=None, steps=5, forward=None):
    """Train with Adam and dropout; return the weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model if forward is None else forward, step).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
    return {name: x.clone() for name, x in model.state_dict().items()}


def forward_passes(model, monitor, count):
    for step in range(count):
        loss_of(model, step)
        monitor.step()


def steps(monitor):
    return [measurement.step for measurement in monitor.history]


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def duplicated():
    """Heads 1 and 3 of layer 1 are equal; head 2 of layer 0 writes nothing."""
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    first, second = (layer.attention for layer in model.bert.encoder.layer)
    with torch.no_grad():
        for projection in (second.self.query, second.self.key):
            projection.weight[24:32] = projection.weight[8:16]
        first.output.dense.weight[:, 16:24] *= 1e-3
    return model
