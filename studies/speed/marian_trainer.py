"""Train and decode with transformers' MarianMT at the sizes of a recipe, and time it."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from studies.speed.timed_loop import lengths_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from repulsive.lab.bench.clock import synchronise
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.systems.translation.batches import TokenBatch, TokenBuckets
from repulsive.lab.systems.translation.task import Translation, TranslationTask
from repulsive.lab.text.pieces import BOS, EOS
from repulsive.lab.text.tokens import PAD

IGNORED = -100  # label of positions without a loss
# Without cuDNN, which torch prefers on some GPUs: it plans for up to half a second at every new shape.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Rows = dict[str, Tensor]


def make_marian(recipe: Translation, vocabulary: int) -> MarianMTModel:
    """Make a MarianMT model with the recipe's layers, widths, heads and dropout, and one shared embedding."""
    sizes = recipe.model
    torch.manual_seed(recipe.seed)
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=sizes.width,
        encoder_layers=sizes.depth[0],
        decoder_layers=sizes.depth[1],
        encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads,
        encoder_ffn_dim=sizes.feed_forward,
        decoder_ffn_dim=sizes.feed_forward,
        activation_function="relu",
        dropout=sizes.dropout,
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    return MarianMTModel(config)


class Batches(Dataset[Rows]):
    """Batches made before the measurement: the sentences of the recipe's padded batches, over several epochs.

    Each side is padded to the longest sentence of the batch, as transformers' collator does.

    Args:
        task: provides the sentences.
        tokens: number of tokens of one side of a batch.
        count: number of batches.
    """

    def __init__(self, task: TranslationTask, tokens: int, count: int) -> None:
        self._sides = task.data.parts["train"].sentences
        source, target = lengths_of(task)
        buckets = TokenBuckets(source, target, tokens, task.recipe.seed)
        self.batches: list[TokenBatch] = []
        for epoch in itertools.count():
            self.batches += buckets.epoch(epoch)
            if len(self.batches) >= count:
                break
        del self.batches[count:]
        self.tokens = [int(target[batch.indices].sum()) for batch in self.batches]  # without padding
        self.rows = [self._make(batch) for batch in self.batches]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Rows:
        return self.rows[i]

    def _make(self, batch: TokenBatch) -> Rows:
        source, target = (side.padded(batch.indices)[0].long() for side in self._sides)
        return {
            "input_ids": source,
            "attention_mask": (source != PAD).long(),
            "decoder_input_ids": F.pad(target[:, :-1], (1, 0), value=BOS),
            "labels": target.masked_fill(target == PAD, IGNORED),
        }


@dataclass(frozen=True)
class Stretch:
    """Measured steps, timed until the device was idle again."""

    seconds: float
    steps: int
    tokens: int


class Timer(TrainerCallback):
    """Time the steps after the warm-up for some seconds; synchronise with the device only at both ends."""

    def __init__(self, tokens: Sequence[int], warm_up: int, seconds: float, device: torch.device) -> None:
        self.tokens, self.warm_up, self.limit, self.device = tokens, warm_up, seconds, device
        self.stretch: Stretch | None = None
        self._started = 0.0

    def after(self, step: int) -> bool:
        """Whether to continue after this step."""
        if step == self.warm_up:
            synchronise(self.device)
            self._started = time.perf_counter()
        if step <= self.warm_up or (time.perf_counter() - self._started < self.limit and step < len(self.tokens)):
            return True
        synchronise(self.device)
        seconds = time.perf_counter() - self._started
        self.stretch = Stretch(seconds, step - self.warm_up, sum(self.tokens[self.warm_up : step]))
        return False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.after(state.global_step):
            control.should_training_stop = True


def trainer_settings(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Arguments of a transformers trainer for a recipe, without logging, saving and checks."""
    optimizer, on_gpu = recipe.optimizer, device.type == "cuda"
    return {
        "bf16": recipe.training.precision == "bf16",
        "use_cpu": not on_gpu,
        "optim": "adamw_torch_fused" if on_gpu else "adamw_torch",
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "warmup_steps": optimizer.warmup,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # it would synchronise after every step
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": on_gpu,
    }


class InOrder(Seq2SeqTrainer):
    """A trainer that takes the batches in order, so that the tokens of each step are known."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@sdpa_kernel(ATTENTION)
def train_with_trainer(recipe: Translation, model: nn.Module, batches: Batches, timer: Timer) -> Stretch:
    """Train with `Seq2SeqTrainer`, without logging, saving and checks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,  # an item is a batch
            max_steps=len(batches),
            lr_scheduler_type="inverse_sqrt",
            label_smoothing_factor=recipe.loss.label_smoothing,
            max_grad_norm=0.0,
            **trainer_settings(recipe, timer.device),
        )
        trainer = InOrder(
            model=model, args=settings, data_collator=lambda items: items[0], train_dataset=batches, callbacks=[timer]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert timer.stretch is not None
    return timer.stretch


@sdpa_kernel(ATTENTION)
def train_bare(
    recipe: Translation, model: nn.Module, batches: Batches, timer: Timer, compiled: bool = False
) -> Stretch:
    """Train in a minimal loop: batches already on the device, autocast, fused AdamW."""
    device, settings = timer.device, recipe.optimizer
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=device.type == "cuda",
    )
    forward: Callable[..., Any] = torch.compile(model, dynamic=True) if compiled else model
    for step, rows in enumerate(_on(device, batches.rows), start=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.training.precision == "bf16"):
            logits = forward(**{name: x for name, x in rows.items() if name != "labels"}, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            rows["labels"].flatten(),
            ignore_index=IGNORED,
            label_smoothing=recipe.loss.label_smoothing,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not timer.after(step):
            break
    assert timer.stretch is not None
    return timer.stretch


def _on(device: torch.device, batches: Iterable[Rows]) -> Iterator[Rows]:
    moved = [{name: x.to(device) for name, x in rows.items()} for rows in batches]
    synchronise(device)
    yield from moved


@torch.inference_mode()
@sdpa_kernel(ATTENTION)
def generate(model: MarianMTModel, source: Tensor, batch: int, beam: int, steps: int) -> Tensor:
    """Translate sentences of equal length, [N, S] -> [N, 1 + steps], by `generate` with its cache.

    Args:
        model: after `never_ends`, in evaluation mode.
        source: on the model's device.
        batch: sentences per batch.
        beam: beam size.
        steps: tokens of every translation.
    """
    translations = [
        model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            num_beams=beam,
            do_sample=False,
            length_penalty=1.0,
            early_stopping=True,
            max_new_tokens=steps,
            use_cache=True,
        )
        for rows in source.split(batch)
    ]
    return torch.cat(translations)


def never_ends(model: MarianMTModel, logit: float) -> MarianMTModel:
    """Set the logit of the end token, so that translations do not end."""
    model.final_logits_bias[0, EOS] = logit
    return model.eval()
