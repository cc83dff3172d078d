"""Heads of pre-trained models: how alike they are in weights and at work, and what each is worth."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from studies.engine import MARGIN, Clock, save
from torch import Tensor

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.redundancy import ablate, heads_of
from repulsive.diagnostics.similarity import Diversity, of_weights
from repulsive.heads import HeadGroup, find_heads
from repulsive.lab.systems.electra.blocks import unpack
from repulsive.lab.systems.electra.model import open_electra, open_masked
from repulsive.lab.systems.electra.task import PretrainingTask
from repulsive.lab.systems.registry import make_task

if TYPE_CHECKING:
    from studies.pretraining.run import Export, Pretrainings

AT_WORK = 64  # blocks that attention and outputs are looked at on
AT_ONCE = 16
METRICS = ("nll", "accuracy", "auc")


def measure_all(study: Pretrainings, clock: Clock) -> None:
    """All models that are there and have not been measured; what is found is a file for each."""
    device = torch.device(study.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    todo = [model for model in study.models() if not place(study, model).is_file()]
    todo.sort(key=lambda model: not model.last)
    print(f"heads: {len(study.models())} models, {len(todo)} to do", flush=True)
    tasks: dict[str, PretrainingTask] = {}
    longest = 0.0
    for done, model in enumerate(todo):
        if clock.left < MARGIN * longest or clock.left <= 0:
            print(f"heads: {len(todo) - done} left", flush=True)
            return
        began = time.monotonic()
        if model.method not in tasks:
            tasks[model.method] = _task(study, model, device)
        save(place(study, model), measure(tasks[model.method], model.folder, device))
        longest = max(longest, time.monotonic() - began)


def place(study: Pretrainings, model: Export) -> Path:
    """The file of a model."""
    return study.out / "heads" / f"{model.name}.json"


def _task(study: Pretrainings, model: Export, device: torch.device) -> PretrainingTask:
    """The task of a method with the first blocks of its development set."""
    (spec,) = study.specs(model.method, ("training.compile=false",), range(model.seed, model.seed + 1), "")
    task = make_task(spec.recipe)
    assert isinstance(task, PretrainingTask)
    task.parts["dev"] = task.parts["dev"][: study.given.items]
    task.to(device)
    return task


@torch.inference_mode()
def measure(task: PretrainingTask, folder: Path, device: torch.device) -> dict[str, Any]:
    """What can be said of the heads that stay: the discriminator's, or those of BERT's network.

    Args:
        task: whose development set is looked at, with the same masks and samples for every head that goes.
        folder: of the model.
        device: where both are.
    """
    model = (open_electra if task.recipe.objective == "electra" else open_masked)(folder).to(device).eval()
    kept: Any = task.repelled(model)
    encoder = (kept if task.recipe.objective == "electra" else kept.network).base_model
    attention_layers = find_attention_layers(encoder)
    running = measure_batches(encoder, _batches(task), attention_layers)
    found: dict[str, Any] = {"weights": _layers(find_heads(encoder))}
    found |= {space: [_numbers(each) for each in layers] for space, layers in running.diversity.items()}
    whole = task.evaluate(model, "dev").metrics
    metrics = [name for name in METRICS if name in whole]
    changes: list[dict[str, Any]] = []
    for layer, head in heads_of(attention_layers):
        with ablate(encoder, [(layer, head)], layers=attention_layers):
            without = task.evaluate(model, "dev").metrics
        changes.append({"layer": layer, "head": head} | {name: without[name] - whole[name] for name in metrics})
    found |= {"blocks": len(task.parts["dev"]), "whole": {name: whole[name] for name in metrics}}
    return found | {"without": changes}


def _batches(task: PretrainingTask) -> list[dict[str, Tensor]]:
    """The first blocks as transformers takes them, nothing replaced."""
    found = []
    for rows in task.parts["dev"][:AT_WORK].split(AT_ONCE):
        tokens, first, ends = unpack(rows, task.data.length)
        along = torch.arange(task.data.length, device=rows.device)
        real = along < ends.unsqueeze(1)
        types = ((along >= first.unsqueeze(1)) & real).long()
        found.append({"input_ids": tokens, "token_type_ids": types, "attention_mask": real.long()})
    return found


def _layers(groups: Sequence[HeadGroup]) -> list[dict[str, float]]:
    """Means over q, k and v, layer by layer."""
    layers: dict[int, list[dict[str, float]]] = {}
    for group, found in zip(groups, of_weights(groups), strict=True):
        layers.setdefault(group.layer, []).append(_numbers(found))
    return [{name: statistics.fmean(each[name] for each in some) for name in some[0]} for some in layers.values()]


def _numbers(found: Diversity) -> dict[str, float]:
    numbers = {"cosine": found.mean_cosine, "distance": found.mean_distance, "effective_heads": found.effective_heads}
    return numbers if math.isnan(found.tokens) else numbers | {"tokens": found.tokens}
