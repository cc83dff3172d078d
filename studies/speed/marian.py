"""The same Transformer in transformers: MarianMT at the sizes of a recipe, how fast it trains and generates."""

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

IGNORED = -100  # a label that does not count
# Not cuDNN's, which torch prefers on some GPUs: it plans anew, for up to half a second, at every shape it meets.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Rows = dict[str, Tensor]


def twin(recipe: Translation, vocabulary: int) -> MarianMTModel:
    """Marian's model with the recipe's layers, widths, heads, dropout and pieces, one table of word vectors for all."""
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
    """Whole batches, made before the clock runs: the sentences of the recipe's padded batches, epoch after epoch.

    Each side is padded to the longest sentence of the batch, as transformers' own collator does.

    Args:
        task: whose sentences.
        tokens: of one side of a batch.
        count: how many batches.
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
        self.tokens = [int(target[batch.indices].sum()) for batch in self.batches]  # real ones
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
    """What was measured: steps without a stop, timed from an idle device until it was idle again."""

    seconds: float
    steps: int
    tokens: int


class Timer(TrainerCallback):
    """Counts the steps after the warm-up until some seconds have passed; waits for the device at the ends alone."""

    def __init__(self, tokens: Sequence[int], warm_up: int, seconds: float, device: torch.device) -> None:
        self.tokens, self.warm_up, self.limit, self.device = tokens, warm_up, seconds, device
        self.found: Stretch | None = None
        self._began = 0.0

    def after(self, step: int) -> bool:
        """Whether to go on after so many steps."""
        if step == self.warm_up:
            synchronise(self.device)
            self._began = time.perf_counter()
        if step <= self.warm_up or (time.perf_counter() - self._began < self.limit and step < len(self.tokens)):
            return True
        synchronise(self.device)
        taken = time.perf_counter() - self._began
        self.found = Stretch(taken, step - self.warm_up, sum(self.tokens[self.warm_up : step]))
        return False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.after(state.global_step):
            control.should_training_stop = True


def of_recipe(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What a trainer of transformers is told of a recipe; everything is off that costs time and is not training."""
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
        "logging_nan_inf_filter": False,  # it waits for every loss
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": on_gpu,
    }


class InOrder(Seq2SeqTrainer):
    """Takes the batches in their order, so that it is known what a stretch of steps held."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


@sdpa_kernel(ATTENTION)
def by_trainer(recipe: Translation, model: nn.Module, batches: Batches, timer: Timer) -> Stretch:
    """`Seq2SeqTrainer` with everything off that costs time and is not training."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,  # an item is a batch
            max_steps=len(batches),
            lr_scheduler_type="inverse_sqrt",
            label_smoothing_factor=recipe.loss.label_smoothing,
            max_grad_norm=0.0,
            **of_recipe(recipe, timer.device),
        )
        trainer = InOrder(
            model=model, args=settings, data_collator=lambda items: items[0], train_dataset=batches, callbacks=[timer]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert timer.found is not None
    return timer.found


@sdpa_kernel(ATTENTION)
def bare(recipe: Translation, model: nn.Module, batches: Batches, timer: Timer, compiled: bool = False) -> Stretch:
    """A loop of one's own: batches on the device before the clock runs, autocast, fused AdamW, nothing else."""
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
    assert timer.found is not None
    return timer.found


def _on(device: torch.device, batches: Iterable[Rows]) -> Iterator[Rows]:
    moved = [{name: x.to(device) for name, x in rows.items()} for rows in batches]
    synchronise(device)
    yield from moved


@torch.inference_mode()
@sdpa_kernel(ATTENTION)
def generate(model: MarianMTModel, source: Tensor, batch: int, beam: int, steps: int) -> Tensor:
    """Translations of sentences of one length, [N, S] -> [N, 1 + steps], by `generate` with its cache.

    Args:
        model: one that never ends, in evaluation mode.
        source: on the model's device.
        batch: sentences at a time.
        beam: hypotheses that are followed.
        steps: words of every translation.
    """
    found = [
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
    return torch.cat(found)


def never_ends(model: MarianMTModel, logit: float) -> MarianMTModel:
    """Make the end as unlikely as that."""
    model.final_logits_bias[0, EOS] = logit
    return model.eval()
