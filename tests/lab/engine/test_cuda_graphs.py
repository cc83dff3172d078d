"""Training with CUDA graphs equals training without: several batch shapes, with a rule, and resumed."""

import pytest
import torch

from repulsive.lab.engine.cuda_graphs import CapturedGradients
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.stop_signals import Stopped
from repulsive.lab.systems.registry import make_task
from tests.lab.engine import tiny

pytestmark = pytest.mark.gpu
# 300 items in batches of 20: fifteen per epoch, of several lengths, most of them frequent enough to be captured.
MORE = ("training.batch=20", "training.log_every=1", "training.save_every=7", "training.tf32=false")


def train(data, folder, *more, stop=0):
    made = Loop(make_task(tiny.recipe(data, *more)), tiny.recipe(data, *more), RunFolder(folder), Watcher(), "cuda")
    if stop:
        learn = made._learn

        def learn_and_stop(batch):
            learn(batch)
            if made.step + 1 == stop:
                made._request.note(15)

        made._learn = learn_and_stop
        with pytest.raises(Stopped):
            made.run()
    else:
        made.run()
    made.folder.close()
    return made


def losses(folder):
    return [line["loss"] for line in RunFolder(folder).lines() if line["kind"] == "train"]


@pytest.mark.parametrize("rule", ["spos", "none"])
def test_captured_training_is_the_same_training(rule, data, tmp_path):
    """Thirty steps without dropout: compare the loss of every step and the final weights."""
    more = (*MORE, "model.dropout=0", f"method.rule={rule}", "optimizer.lr=0.01")
    runs = {}
    for capture in ("true", "false"):
        runs[capture] = train(data, tmp_path / capture, *more, f"training.capture={capture}")
    captured, eager = runs["true"], runs["false"]
    assert eager._gradients.captured is None
    assert captured.total == 30 and len(captured._gradients.captured._graphs) >= 3  # several shapes, really captured
    assert losses(tmp_path / "true") == pytest.approx(losses(tmp_path / "false"), abs=2e-5)
    for name, weight in captured.bare.state_dict().items():
        assert torch.allclose(weight, eager.bare.state_dict()[name], rtol=0, atol=5e-4), name


def test_gradients_stay_where_they_are(data, tmp_path):
    """Replays write to fixed addresses, so parameters must keep their gradient tensors."""
    made = train(data, tmp_path, *MORE)
    places = {p.grad.data_ptr() for p in made.bare.parameters() if p.requires_grad}
    assert places == {g.data_ptr() for g in made._gradients.captured._grads}


def test_replays_draw_new_random_numbers(data, tmp_path):
    """Dropout masks differ between replays, and equal those of eager calls with the same seed."""
    device = torch.device("cuda")
    weight = torch.nn.Parameter(torch.ones(1000, device=device))

    def compute(inputs, length):
        (torch.nn.functional.dropout(weight * inputs["x"], 0.5)).sum().backward()

    drawn = []
    for times in (1, 1_000):  # never captured; captured at the third call
        torch.manual_seed(5)
        weight.grad = None
        gradients = CapturedGradients(compute, [weight], device) if times == 1_000 else None
        found = []
        for _ in range(8):
            if gradients is None:
                weight.grad = None
                compute({"x": torch.ones(1000, device=device)}, 0)
            else:
                gradients({"x": torch.ones(1000)}, 0)
            found.append(weight.grad.clone())
        drawn.append(torch.stack(found))
    assert torch.equal(*drawn)
    assert len(torch.unique(drawn[0], dim=0)) == 8


@pytest.mark.parametrize("stop", [4, 16])
def test_resumed_it_is_the_same(stop, data, tmp_path):
    """With dropout and noise, stopped before and after the first captures; results differ by rounding only."""
    train(data, tmp_path / "whole", *MORE)
    train(data, tmp_path / "parts", *MORE, stop=stop)
    made = train(data, tmp_path / "parts", *MORE)
    assert made.step == 30
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=2e-4)
    first, second = (RunFolder(tmp_path / name).items("test")["logits"] for name in ("whole", "parts"))
    assert torch.allclose(first, second, atol=5e-3)


def test_bad_losses_are_found_in_replays(data, tmp_path):
    """The meter is updated inside the graph: the error names the first step with a bad loss, not the logged one."""
    from repulsive.errors import DivergedError

    recipe = tiny.recipe(data, *MORE[:1], "training.log_every=50", "training.tf32=false")
    made = Loop(make_task(recipe), recipe, RunFolder(tmp_path), Watcher(), "cuda")
    learn = made._learn

    def learn_and_break(batch):
        if made.step + 1 == 13:
            with torch.no_grad():
                made.bare.classify[-1].bias.fill_(float("nan"))
        learn(batch)

    made._learn = learn_and_break
    with pytest.raises(DivergedError, match="step 13: the loss is not a finite number"):
        made.run()
    made.folder.close()
    assert made.step == 15  # the end of the epoch, where it is logged


def test_cpu_and_gpu_in_one_process(data, tmp_path):
    """The device of an earlier run in the same process does not matter."""
    cpu = Spec(tiny.recipe(data), tmp_path / "cpu", "cpu")
    assert train(data, tmp_path / "gpu", *MORE).device.type == "cuda"
    made = tiny.loop(cpu)
    assert made.device.type == "cpu"
    made.run()
    made.folder.close()
