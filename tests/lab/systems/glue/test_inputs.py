"""What the model sees in fine-tuning on GLUE, and its loss."""

import pytest
import torch

from repulsive.lab.systems.glue.task import joined
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.systems.glue import toy_glue
from tests.lab.systems.glue.toy_glue import CLS, SEP, task_and_model
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def test_rows_are_joined_as_bert_has_them(data):
    task, _ = task_and_model(data, "mrpc")
    part, picked = task.parts["train"], torch.tensor([3, 0, 7])
    turned = torch.tensor([False, True, False])
    ids, segments, real = joined(part, picked, 24, (CLS, SEP), turned)
    for row, (number, turn) in enumerate(zip(picked.tolist(), turned.tolist(), strict=True)):
        a, b = (side[number].tolist() for side in part.sentences)
        a, b = (b, a) if turn else (a, b)
        expected = [CLS, *a, SEP, *b, SEP]
        rest = 24 - len(expected)
        assert ids[row].tolist() == expected + [0] * rest
        assert segments[row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * rest
        assert real[row].tolist() == [True] * len(expected) + [False] * rest


def test_single_texts_have_one_segment(data):
    task, _ = task_and_model(data, "cola")
    ids, segments, real = joined(task.parts["train"], torch.tensor([5]), 16, (CLS, SEP))
    words = task.parts["train"].sentences[0][5].tolist()
    assert ids[0].tolist() == [CLS, *words, SEP] + [0] * (14 - len(words))
    assert int(segments.sum()) == 0 and int(real.sum()) == len(words) + 2


def test_pairs_are_trained_on_both_ways_round(data):
    task, _ = task_and_model(data, "mrpc")
    assert open_recipe("glue/mrpc").data.swapped and open_recipe("glue/sts").data.swapped
    assert task.num_data == 320
    seen = [
        (row, turn)
        for batch in task.order(0)
        for inputs in (task.fetch(batch),)
        for row, turn in zip(inputs["rows"].tolist(), inputs["swapped"].tolist(), strict=True)
    ]
    assert sorted(seen) == [(row, turn) for row in range(160) for turn in (False, True)]
    assert max(batch.length for batch in task.order(0)) <= 128


def test_padding_changes_nothing(data):
    task, model = task_and_model(data, "rte")
    picked = torch.arange(4)
    short, long = (model(*joined(task.parts["train"], picked, length, (CLS, SEP))) for length in (24, 96))
    assert torch.allclose(short, long, atol=1e-5)


def test_a_batch_is_padded_to_no_more_than_the_model_has_places_for(tmp_path):
    folder = toy_glue.make_data(tmp_path, "rte", sizes=(60, 9, 9))
    lines = (folder / "raw" / "RTE" / "train.tsv").read_text().splitlines()
    long = [f"{i}\t{'w1 ' * 140}\tw2\tentailment" for i in range(4)]
    (folder / "raw" / "RTE" / "train.tsv").write_text("\n".join([*lines, *long]) + "\n")
    settings = {"glue_task": "rte", "vocabulary": folder / "vocab.txt", "force": True}
    toy_glue.prepare("glue", folder / "raw", folder / "rte", **settings)
    task, _ = task_and_model(folder, "rte")
    assert max(batch.length for batch in task.order(0)) == 128


@pytest.mark.parametrize(("task", "texts"), [("cola", 1), ("mnli", 2), ("sts", 2)])
def test_the_loss_is_a_mean_over_rows(task, texts, data):
    made, model = task_and_model(data, task)
    batch = made.order(0)[0]
    inputs, part, total = made.fetch(batch), made.parts["train"], 0.0
    for row, turn in zip(inputs["rows"].tolist(), inputs["swapped"].tolist(), strict=True):  # one by one: no padding
        sides = [side[row].tolist() for side in part.sentences]
        sides = sides[::-1] if turn else sides
        ids = torch.tensor([[CLS, *(piece for side in sides for piece in [*side, SEP])]])
        segments = torch.tensor([[0] * (len(sides[0]) + 2) + [1] * (len(sides[-1]) + 1) * (texts - 1)])
        logits = model(ids, segments, torch.ones_like(ids, dtype=torch.bool))[0].double()
        label = part.labels[row]
        total += (logits[0] - label / 5) ** 2 if task == "sts" else -logits.log_softmax(-1)[label]
    found = made.loss(model, inputs, batch.length).item()
    assert found == pytest.approx(total.item() / len(batch), rel=1e-5)


@pytest.mark.parametrize("task", ["sst", "sts", "mnli"])
def test_the_loss_never_waits_for_the_device(task, data):
    """Tensors of the device "meta" have no values: whoever waits for one fails. So no mask is asked what it hides."""
    made = make_task(toy_glue.recipe(data, task))
    model = made.model().to("meta")
    batch = made.order(0)[0]
    made.to(torch.device("meta"))
    inputs = {name: x.to("meta") for name, x in made.fetch(batch).items()}
    made.loss(model, inputs, batch.length).backward()
    assert all(p.grad is not None for p in model.parameters())
