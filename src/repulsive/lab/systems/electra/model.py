"""ELECTRA (Clark et al., 2020) from modules of the package transformers, and BERT's objective at the same sizes.

The generator predicts masked tokens, and the discriminator detects which tokens were replaced. They share all
embeddings, LayerNorm included, and the generator's output is tied to them, as in google-research/electra.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError, DataError
from repulsive.extras import install_command
from repulsive.safety.model_folders import offline, read_config

GENERATOR = "generator"  # subfolder of a discriminator's folder
_POSITIONS = 512
_STRETCH = 128  # classes per group of the two-stage sampler
_BELOW_ONE = 1 - 2.0**-20  # factor of uniform numbers, so that rounding never gives 1


@dataclass(frozen=True, kw_only=True)
class ElectraSizes:
    """Sizes of a discriminator and its generator. The defaults are ELECTRA-small's.

    Args:
        layers: number of layers of both networks.
        width: size of a token's state in the discriminator.
        heads: attention heads in each layer of the discriminator.
        feed_forward: hidden units of the discriminator's feed-forward blocks.
        embedding: size of the shared embeddings.
        generator: width, heads and hidden units of the generator, as a fraction of the discriminator's.
        dropout: dropout probability on states and on attention weights.
    """

    layers: int = 12
    width: int = 256
    heads: int = 4
    feed_forward: int = 1024
    embedding: int = 128
    generator: float = 0.25
    dropout: float = 0.1


@dataclass(frozen=True)
class ElectraConfig(ElectraSizes):
    """Configuration of a discriminator and its generator.

    Args:
        vocabulary: number of pieces.
        padding: id of the padding token.
    """

    vocabulary: int
    padding: int = 0

    def config(self, share: float = 1.0) -> Any:
        """Return a transformers config for a model whose width is the fraction `share` of the discriminator's."""
        heads = max(1, int(self.heads * share))
        return _transformers().ElectraConfig(
            vocab_size=self.vocabulary,
            embedding_size=self.embedding,
            hidden_size=int(self.width * share),
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            intermediate_size=int(self.feed_forward * share),
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=_POSITIONS,
            pad_token_id=self.padding,
            attn_implementation="sdpa",
        )


class MaskedModel(nn.Module):
    """A masked language model of the ELECTRA or BERT family.

    Args:
        network: a model of transformers, with its head.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, types: Tensor, places: Tensor, seen: Tensor | None = None) -> Tensor:
        """Compute the logits of the word pieces at some positions, [B, N, V].

        Args:
            tokens: token ids, some of them masked, int64 [B, T].
            types: segment ids, int64 [B, T].
            places: positions, int64 [B, N].
            seen: padding mask, False at padding, bool [B, 1, 1, T]; None without padding.
        """
        return logits_at(self.network, tokens, types, places, seen)


class Electra(nn.Module):
    """A generator and a discriminator that are trained together.

    Args:
        generator: `ElectraForMaskedLM`.
        discriminator: `ElectraForPreTraining`; the generator shares its embeddings.
    """

    def __init__(self, generator: Any, discriminator: Any) -> None:
        super().__init__()
        shared = discriminator.electra.embeddings
        generator.electra.embeddings = shared
        generator.generator_lm_head.weight = shared.word_embeddings.weight
        self.generator = generator
        self.discriminator = discriminator
        self.sampler: Any = Sampler()

    def forward(
        self,
        tokens: Tensor,
        masked: Tensor,
        types: Tensor,
        places: Tensor,
        first: Tensor,
        seen: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predict masked tokens, replace them by the generator's samples, and detect the replaced tokens.

        Args:
            tokens: original token ids, int64 [B, T].
            masked: the same with masks, int64 [B, T].
            types: segment ids, int64 [B, T].
            places: masked positions, int64 [B, N]; [CLS], at position 0, is never replaced.
            first: index of the first occurrence of each entry of `places`, int64 [B, N]: a position that was drawn
                twice is replaced once.
            seen: padding mask, False at padding, bool [B, 1, 1, T]; None without padding.
            draw: generator of the samples; None: torch's global one.

        Returns:
            Logits of the generator, [B, N, V]; tokens with its samples, int64 [B, T]; logits of "replaced", [B, T].
        """
        logits = logits_at(self.generator, masked, types, places, seen)  # [B, N, V]
        samples = self.sampler(logits.detach(), draw).gather(1, first)  # [B, N]
        corrupted = replace_tokens(tokens, places, samples)
        states = states_of(self.discriminator.electra, corrupted, types, seen)
        return logits, corrupted, self.discriminator.discriminator_predictions(states)


def keep_narrow(model: nn.Module) -> None:
    """Make LayerNorm return the dtype of its input: under autocast it returns float32, which doubles memory traffic."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(_to_input_dtype)


def _to_input_dtype(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(inputs[0].dtype)


def states_of(network: Any, tokens: Tensor, types: Tensor, seen: Tensor | None) -> Tensor:
    """Compute the last hidden states of ELECTRA or BERT, [B, T, D], with the mask as given.

    The `forward` of transformers creates a mask while a CUDA graph is captured, even without padding, and attention
    with a mask is slow.
    """
    states = _narrow(network.embeddings(input_ids=tokens, token_type_ids=types))
    if hasattr(network, "embeddings_project"):
        states = network.embeddings_project(states)
    hidden: Tensor = network.encoder(states, attention_mask=seen)[0]
    return hidden


def _narrow(states: Tensor) -> Tensor:
    """Convert to the dtype of autocast, if it is enabled."""
    kind = states.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return states
    return states.to(torch.get_autocast_dtype(kind))


def logits_at(network: Any, tokens: Tensor, types: Tensor, places: Tensor, seen: Tensor | None) -> Tensor:
    """Compute the logits of a masked language model at some positions, [B, N, V]; see `MaskedModel.forward`."""
    states = states_of(network.base_model, tokens, types, seen)
    states = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))  # [B, N, D]
    if hasattr(network, "generator_lm_head"):
        states = network.generator_predictions(states)
        head = network.generator_lm_head
        logits: Tensor = padded_linear(head, states, _STRETCH) if states.is_cuda else head(states)
    else:
        logits = network.cls(states)
    return logits


def padded_linear(linear: nn.Linear, x: Tensor, multiple: int = 8) -> Tensor:
    """Apply a linear map and pad its outputs with -inf, which a softmax ignores, to a multiple of `multiple`.

    Matrix units need rows that start at multiples of 16 bytes, which rows of 30,522 numbers in half precision do not.
    """
    extra = -linear.out_features % multiple
    if not extra:
        return F.linear(x, linear.weight, linear.bias)
    bias = F.pad(linear.bias, (0, extra), value=-torch.inf)
    return F.linear(x, F.pad(linear.weight, (0, 0, 0, extra)), bias)


class Sampler(nn.Module):
    """`sample` as a module, so that it can be compiled into a single pass over the logits."""

    def forward(self, logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
        return sample(logits, draw)


def sample(logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """Sample a class from each softmax in two stages: a group of classes, then a class of the group.

    This needs two uniform random numbers, whereas the Gumbel trick needs noise for every class.

    Args:
        logits: [..., V].
        draw: random generator; None: torch's global one.

    Returns:
        int64 [...].
    """
    extra = -logits.shape[-1] % _STRETCH
    cut = F.pad(logits, (0, extra), value=-torch.inf).unflatten(-1, (-1, _STRETCH))  # [..., C, S]
    uniform = torch.rand(*logits.shape[:-1], 2, device=logits.device, generator=draw) * _BELOW_ONE
    highest = cut.amax((-2, -1), keepdim=True).float()
    stretch = _reached((cut.float() - highest).exp().sum(-1), uniform[..., :1])  # [..., 1]
    own = cut.take_along_dim(stretch.unsqueeze(-1), -2).squeeze(-2).float()  # [..., S]
    place = _reached((own - own.amax(-1, keepdim=True)).exp(), uniform[..., 1:])
    return (_STRETCH * stretch + place).squeeze(-1)


def _reached(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which the cumulative sum of weights [..., C] exceeds a fraction of the total, [..., 1]."""
    ends = weights.cumsum(-1)
    return (ends <= uniform * ends[..., -1:]).sum(-1, keepdim=True)


def replace_tokens(tokens: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Copy tokens and replace those at some positions; position 0 keeps its token.

    Args:
        tokens: int64 [B, T].
        places: positions, int64 [B, N].
        values: int64 [B, N]; equal for positions that occur twice.
    """
    changed = tokens.scatter(1, places, values)
    return torch.cat([tokens[:, :1], changed[:, 1:]], 1)


def make_electra(sizes: ElectraConfig) -> Electra:
    """Make an ELECTRA with random weights."""
    package = _transformers()
    discriminator = package.ElectraForPreTraining(sizes.config())
    return Electra(package.ElectraForMaskedLM(sizes.config(sizes.generator)), discriminator)


def make_masked(sizes: ElectraConfig) -> MaskedModel:
    """Make a masked language model of the discriminator's size, with random weights."""
    return MaskedModel(_transformers().ElectraForMaskedLM(sizes.config()))


def open_electra(folder: Path, share: float = 0.25) -> Electra:
    """Load an ELECTRA from a folder with a discriminator and, in the subfolder `generator`, a generator.

    Args:
        folder: a folder that `save_pretrained` wrote; nothing is downloaded.
        share: width of a generator with random weights, as a fraction, if the folder has none.

    Raises:
        DataError: the folder does not exist, or holds another kind of model.
    """
    package = _transformers()
    discriminator = _opened(package.ElectraForPreTraining, folder)
    if (folder / GENERATOR).is_dir():
        return Electra(_opened(package.ElectraForMaskedLM, folder / GENERATOR), discriminator)
    known = discriminator.config
    sizes = ElectraConfig(
        known.vocab_size,
        known.pad_token_id,
        layers=known.num_hidden_layers,
        width=known.hidden_size,
        heads=known.num_attention_heads,
        feed_forward=known.intermediate_size,
        embedding=known.embedding_size,
        dropout=known.hidden_dropout_prob,
    )
    config = sizes.config(share)
    config.max_position_embeddings = known.max_position_embeddings
    return Electra(package.ElectraForMaskedLM(config), discriminator)


def open_masked(folder: Path) -> MaskedModel:
    """Load a masked language model from a folder: BERT, or an ELECTRA generator.

    Raises:
        DataError: the folder does not exist, or holds another kind of model.
    """
    network = _opened(_transformers().AutoModelForMaskedLM, folder)
    if not hasattr(network, "generator_lm_head") and not hasattr(network, "cls"):
        raise DataError(f"{folder}: is a {type(network).__name__}; only BERT and ELECTRA are supported")
    return MaskedModel(network)


def _opened(kind: Any, folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json; name a folder that save_pretrained or `repulsive export` wrote")
    try:
        read_config(folder)  # refuses code to download, and sizes beyond the limit
        local = {"local_files_only": True, "trust_remote_code": False}
        with without_progress_bars(), offline():
            return kind.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, **local)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: cannot be opened as {kind.__name__} ({reason})") from None


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers within a block."""
    logging = importlib.import_module("transformers.utils.logging")
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise DataError(f"ELECTRA needs the package transformers: {install_command('transformers')}") from None
