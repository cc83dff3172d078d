"""The loss of pre-training: by hand, over several processes, on the device, and compiled."""

import dataclasses
import math

import pytest
import torch

from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.systems.electra.blocks import unpack
from repulsive.lab.systems.electra.loss import total_loss
from repulsive.lab.systems.registry import make_task
from tests.lab.systems import running
from tests.lab.systems.electra import words
from tests.lab.systems.electra.words import task_and_model
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.mark.parametrize("objective", ["electra", "bert"])
@pytest.mark.parametrize("packing", ["full", "official"])
def test_the_loss_by_hand(packing, objective, data, padded):
    """Block by block and place by place, without padding, with transformers' own forward passes."""
    task, model = task_and_model(data if packing == "full" else padded, f"objective={objective}")
    batch = task.order(0)[0]
    table = task.parts["train"][batch.indices]
    torch.manual_seed(7)
    tokens, types, seen, masked = task._masked(table, 32)
    logits, corrupted, _ = task._predict(model, tokens, types, seen, masked)
    guessed, detected, places, pieces = 0.0, 0.0, 0, 0
    for row, (end, middle) in enumerate(zip(unpack(table, 32)[2].tolist(), unpack(table, 32)[1].tolist(), strict=True)):
        kinds = torch.tensor([[0] * middle + [1] * (end - middle)])
        network = model.generator if objective == "electra" else model.network
        logs = network(masked.tokens[row : row + 1, :end], token_type_ids=kinds).logits[0].log_softmax(-1)
        for place, counts in zip(masked.places[row].tolist(), masked.counts[row].tolist(), strict=True):
            guessed -= counts * logs[place, tokens[row, place]].item()
            places += counts
        pieces += end
        if objective == "electra":
            said = model.discriminator(corrupted[row : row + 1, :end], token_type_ids=kinds).logits[0]
            for x, was, is_now in zip(said.tolist(), tokens[row].tolist(), corrupted[row].tolist(), strict=False):
                p = 1 / (1 + math.exp(-x))
                detected -= math.log(p if was != is_now else 1 - p)
    expected = guessed / places + 50 * detected / pieces
    torch.manual_seed(7)
    assert task.loss(model, task.fetch(batch), 32).item() == pytest.approx(expected, rel=1e-4)
    assert logits.shape[:2] == masked.places.shape and (packing == "full") == (seen is None)


def test_processes_together_have_the_loss_of_one(padded, monkeypatch):
    """Sums are over the whole batch's pieces and places, whoever has them."""
    task, model = task_and_model(padded)
    batch = task.order(0)[1]
    assert batch.means is not None and float(batch.means[0]) < 32

    def fixed(rows, length, draw=None):  # masks and samples that are functions of the block alone
        found = original(rows, length, torch.Generator().manual_seed(3))
        ends = unpack(rows, length)[2]
        last = (ends - 2).unsqueeze(1).expand(-1, found[3].places.shape[1]) * (found[3].counts > 0)
        answers = found[0].gather(1, last)
        return *found[:3], dataclasses.replace(found[3], tokens=found[0], places=last, answers=answers)

    original = task._masked
    monkeypatch.setattr(task, "_masked", fixed)
    monkeypatch.setattr("repulsive.lab.systems.electra.model.sample", lambda logits, draw=None: logits.argmax(-1))
    whole = task.loss(model, task.fetch(batch), 32)
    split = 0.0
    for index in range(3):
        mine, count = rank_share(batch, index, 3)
        split += task.loss(model, task.fetch(mine), 32) * count / len(batch)
    assert split.item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["electra", "bert"])
@pytest.mark.parametrize("packing", ["full", "official"])
def test_the_loss_never_waits_for_the_device(packing, objective, data, padded):
    running.check_the_loss_never_waits(
        make_task(words.recipe(data if packing == "full" else padded, f"objective={objective}"))
    )


def test_blocks_from_the_memory_map_are_the_same(data, monkeypatch):
    task, model = task_and_model(data)
    monkeypatch.setattr("repulsive.lab.systems.electra.task._ON_DEVICE", 0)
    other, _ = task_and_model(data)
    assert other.fetch(other.order(0)[0]).keys() == {"rows"}
    losses = []
    for each in (task, other):
        each.to(torch.device("cpu"))
        torch.manual_seed(1)
        losses.append(each.loss(model, each.fetch(each.order(0)[0]), 32).item())
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["full", "official"])
def test_compiled_masks_and_losses_are_of_the_same_kind(packing, data, padded):
    """Compilers draw other numbers: what must hold of any draw holds, and the loss of it is what eager code makes."""
    task, model = task_and_model(data if packing == "full" else padded, "training.compile=true")
    batch = task.order(0)[0]
    rows = task.parts["train"][batch.indices]
    tokens, types, seen, masked = task._masked(rows, 32)
    marks = torch.tensor([task.marks[name] for name in ("PAD", "CLS", "SEP")])
    counted = masked.counts.bool()
    assert torch.equal(masked.answers, tokens.gather(1, masked.places)) and bool(counted.any())
    assert not torch.isin(masked.answers[counted], marks).any() and bool((masked.tokens != tokens).any())
    assert (seen is None) == (packing == "full") and types.shape == tokens.shape
    said = task._predict(model, tokens, types, seen, masked)
    numbers = torch.tensor(70.0), torch.tensor(500.0), 50.0
    given = *said, tokens, masked.answers, masked.counts, seen, *numbers
    assert task._total_loss(*given).item() == pytest.approx(total_loss(*given).item(), rel=1e-5)
