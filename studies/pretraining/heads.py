"""Measure the heads of pre-trained models: similarity of weights, attention and outputs, and the effect of removal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from studies.engine import MARGIN, TimeLimit
from studies.output import save
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
    from studies.pretraining.study import Export, Pretrainings

OBSERVED_BLOCKS = 64  # on which attention and outputs are compared
BATCH = 16
METRICS = ("nll", "accuracy", "auc")


def measure_all(study: Pretrainings, limit: TimeLimit) -> None:
    """Measure all exported models that have not been measured; write one file for each."""
    device = torch.device(study.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    missing = [model for model in study.models() if not heads_file(study, model).is_file()]
    missing.sort(key=lambda model: not model.is_last)
    print(f"heads: {len(study.models())} models, {len(missing)} to do", flush=True)
    tasks: dict[str, PretrainingTask] = {}
    longest = 0.0
    for done, model in enumerate(missing):
        if limit.seconds_left < MARGIN * longest or limit.seconds_left <= 0:
            print(f"heads: {len(missing) - done} left", flush=True)
            return
        started = time.monotonic()
        if model.method not in tasks:
            tasks[model.method] = _task(study, model, device)
        save(heads_file(study, model), measure(tasks[model.method], model.folder, device))
        longest = max(longest, time.monotonic() - started)


def heads_file(study: Pretrainings, model: Export) -> Path:
    """The file with the measurements of a model."""
    return study.out / "heads" / f"{model.name}.json"


def _task(study: Pretrainings, model: Export, device: torch.device) -> PretrainingTask:
    """The task of a method, with the first blocks of the development set."""
    (spec,) = study.specs(model.method, ("training.compile=false",), range(model.seed, model.seed + 1), "")
    task = make_task(spec.recipe)
    assert isinstance(task, PretrainingTask)
    task.parts["dev"] = task.parts["dev"][: study.arguments.items]
    task.to(device)
    return task


@torch.inference_mode()
def measure(task: PretrainingTask, folder: Path, device: torch.device) -> dict[str, Any]:
    """Measure the heads of the encoder that is kept after pre-training: ELECTRA's discriminator, or BERT.

    Args:
        task: provides the development set, with the same masks and samples for every ablated head.
        folder: of the model.
        device: of task and model.
    """
    model = (open_electra if task.recipe.objective == "electra" else open_masked)(folder).to(device).eval()
    kept: Any = task.repelled(model)
    encoder = (kept if task.recipe.objective == "electra" else kept.network).base_model
    attention_layers = find_attention_layers(encoder)
    running = measure_batches(encoder, _batches(task), attention_layers)
    facts: dict[str, Any] = {"weights": _layers(find_heads(encoder))}
    facts |= {space: [_numbers(each) for each in layers] for space, layers in running.diversity.items()}
    whole = task.evaluate(model, "dev").metrics
    metrics = [name for name in METRICS if name in whole]
    changes: list[dict[str, Any]] = []
    for layer, head in heads_of(attention_layers):
        with ablate(encoder, [(layer, head)], layers=attention_layers):
            without = task.evaluate(model, "dev").metrics
        changes.append({"layer": layer, "head": head} | {name: without[name] - whole[name] for name in metrics})
    facts |= {"blocks": len(task.parts["dev"]), "whole": {name: whole[name] for name in metrics}}
    return facts | {"without": changes}


def _batches(task: PretrainingTask) -> list[dict[str, Tensor]]:
    """The first blocks as inputs of transformers models, without replaced tokens."""
    batches = []
    for rows in task.parts["dev"][:OBSERVED_BLOCKS].split(BATCH):
        tokens, first, ends = unpack(rows, task.data.length)
        along = torch.arange(task.data.length, device=rows.device)
        real = along < ends.unsqueeze(1)
        types = ((along >= first.unsqueeze(1)) & real).long()
        batches.append({"input_ids": tokens, "token_type_ids": types, "attention_mask": real.long()})
    return batches


def _layers(groups: Sequence[HeadGroup]) -> list[dict[str, float]]:
    """Similarity of weights in each layer, means over q, k and v."""
    layers: dict[int, list[dict[str, float]]] = {}
    for group, diversity in zip(groups, of_weights(groups), strict=True):
        layers.setdefault(group.layer, []).append(_numbers(diversity))
    return [{name: statistics.fmean(each[name] for each in some) for name in some[0]} for some in layers.values()]


def _numbers(diversity: Diversity) -> dict[str, float]:
    numbers = {
        "cosine": diversity.mean_cosine,
        "distance": diversity.mean_distance,
        "effective_heads": diversity.effective_heads,
    }
    return numbers if math.isnan(diversity.tokens) else numbers | {"tokens": diversity.tokens}
