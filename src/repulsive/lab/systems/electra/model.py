"""ELECTRA (Clark et al., 2020) out of transformers' own modules, and BERT's objective on the same sizes.

The generator fills masked places, the discriminator says of every token whether it was replaced. They share all of
their embeddings, LayerNorm included, and the generator's output is tied to them, as in google-research/electra.
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
from repulsive.safety.model_folders import offline, read_config

GENERATOR = "generator"  # folder beside a discriminator's files
_POSITIONS = 512
_STRETCH = 128  # classes that are summed up before one of them is drawn
_BELOW_ONE = 1 - 2.0**-20  # times a uniform number: rounding does not bring it to 1


@dataclass(frozen=True)
class ElectraSizes:
    """Sizes of a discriminator, and of the generator beside it. The defaults are ELECTRA-small's.

    Args:
        vocabulary: pieces.
        layers: of both.
        width: of a token's state in the discriminator.
        heads: in each of its layers.
        feed_forward: inner units.
        embedding: size of what both share.
        generator: width, heads and inner units of the generator over the discriminator's.
        dropout: on states and on attention weights.
        padding: number of the piece that fills blocks.
    """

    vocabulary: int
    layers: int = 12
    width: int = 256
    heads: int = 4
    feed_forward: int = 1024
    embedding: int = 128
    generator: float = 0.25
    dropout: float = 0.1
    padding: int = 0

    def config(self, share: float = 1.0) -> Any:
        """transformers' own config of a model whose width is a share of the discriminator's."""
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
    """A masked language model, of ELECTRA's or of BERT's family: it says what stood at masked places.

    Args:
        network: transformers' model with its head.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, types: Tensor, places: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits [B, N, V] of the pieces at some places.

        Args:
            tokens: int64 [B, T], some of them masked.
            types: which segment, int64 [B, T].
            places: int64 [B, N].
            seen: bool [B, 1, 1, T], False for padding; None where there is none.
        """
        return logits_at(self.network, tokens, types, places, seen)


class Electra(nn.Module):
    """A generator and a discriminator that learn together.

    Args:
        generator: `ElectraForMaskedLM`.
        discriminator: `ElectraForPreTraining`; the generator gets its embeddings.
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
        """What both say of a batch.

        Args:
            tokens: as the text has them, int64 [B, T].
            masked: the same with masks, int64 [B, T].
            types: which segment, int64 [B, T].
            places: what is to be filled, int64 [B, N]; [CLS], at place 0, is never replaced.
            first: where `places` names a place for the first time, int64 [B, N]: a place that was drawn twice is
                replaced once.
            seen: bool [B, 1, 1, T], False for padding; None where there is none.
            draw: of the samples; torch's own by default.

        Returns:
            Logits of the generator [B, N, V]; the tokens with its samples in place, int64 [B, T]; logits of "replaced"
            [B, T].
        """
        logits = logits_at(self.generator, masked, types, places, seen)  # [B, N, V]
        samples = self.sampler(logits.detach(), draw).gather(1, first)  # [B, N]
        corrupted = put(tokens, places, samples)
        states = states_of(self.discriminator.electra, corrupted, types, seen)
        return logits, corrupted, self.discriminator.discriminator_predictions(states)


def keep_narrow(model: nn.Module) -> None:
    """Let norms give what they were given: autocast has them give float32, and twice the bytes move between blocks."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(_as_given)


def _as_given(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.to(inputs[0].dtype)


def states_of(network: Any, tokens: Tensor, types: Tensor, seen: Tensor | None) -> Tensor:
    """What transformers' ELECTRA or BERT makes of tokens, [B, T, D], with the mask as it is.

    Its `forward` makes a mask of its own while a CUDA graph is captured, even where there is nothing to hide, and
    attention with a mask is slow.
    """
    states = _narrow(network.embeddings(input_ids=tokens, token_type_ids=types))
    if hasattr(network, "embeddings_project"):
        states = network.embeddings_project(states)
    found: Tensor = network.encoder(states, attention_mask=seen)[0]
    return found


def _narrow(states: Tensor) -> Tensor:
    """In autocast's type, where it is on."""
    kind = states.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return states
    return states.to(torch.get_autocast_dtype(kind))


def logits_at(network: Any, tokens: Tensor, types: Tensor, places: Tensor, seen: Tensor | None) -> Tensor:
    """Logits [B, N, V] of a masked language model at some places; arguments as in `MaskedModel.forward`."""
    states = states_of(network.base_model, tokens, types, seen)
    states = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))  # [B, N, D]
    if hasattr(network, "generator_lm_head"):
        made = network.generator_predictions(states)
        head = network.generator_lm_head
        found: Tensor = padded_linear(head, made, _STRETCH) if made.is_cuda else head(made)
    else:
        found = network.cls(states)
    return found


def padded_linear(linear: nn.Linear, x: Tensor, multiple: int = 8) -> Tensor:
    """A linear map, which has a bias, with as many more outputs, all -inf, as make their number a multiple.

    A softmax does not see them. Matrix units want rows that begin at multiples of 16 bytes, which those of 30,522 words
    in half precision do not.
    """
    extra = -linear.out_features % multiple
    if not extra:
        return F.linear(x, linear.weight, linear.bias)
    bias = F.pad(linear.bias, (0, extra), value=-torch.inf)
    return F.linear(x, F.pad(linear.weight, (0, 0, 0, extra)), bias)


class Sampler(nn.Module):
    """`sample` as a module, so that it can be compiled: several passes over all words become one."""

    def forward(self, logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
        return sample(logits, draw)


def sample(logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """A class from each softmax: first a stretch of classes, then one within it.

    Two uniform numbers do, where Gumbel's trick wants noise for every class.

    Args:
        logits: [..., V].
        draw: of the numbers; torch's own by default.

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
    """Where the sum of weights [..., C] so far exceeds a share of all, int64 [..., 1]."""
    ends = weights.cumsum(-1)
    return (ends <= uniform * ends[..., -1:]).sum(-1, keepdim=True)


def put(tokens: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A copy of tokens with values at some places; place 0 keeps its token.

    Args:
        tokens: int64 [B, T].
        places: int64 [B, N].
        values: int64 [B, N]; those of a place that occurs twice must be equal.
    """
    changed = tokens.scatter(1, places, values)
    return torch.cat([tokens[:, :1], changed[:, 1:]], 1)


def make_electra(sizes: ElectraSizes) -> Electra:
    """A fresh ELECTRA."""
    package = _transformers()
    discriminator = package.ElectraForPreTraining(sizes.config())
    return Electra(package.ElectraForMaskedLM(sizes.config(sizes.generator)), discriminator)


def make_masked(sizes: ElectraSizes) -> MaskedModel:
    """A fresh masked language model of the discriminator's size."""
    return MaskedModel(_transformers().ElectraForMaskedLM(sizes.config()))


def open_electra(folder: Path, share: float = 0.25) -> Electra:
    """An ELECTRA from a folder of a discriminator, and of a generator in `generator` below it.

    Args:
        folder: as `save_pretrained` writes it; it is never fetched from anywhere.
        share: width of a fresh generator where there is none.

    Raises:
        DataError: there is no such folder, or it holds no ELECTRA.
    """
    package = _transformers()
    discriminator = _opened(package.ElectraForPreTraining, folder)
    if (folder / GENERATOR).is_dir():
        return Electra(_opened(package.ElectraForMaskedLM, folder / GENERATOR), discriminator)
    known = discriminator.config
    sizes = ElectraSizes(
        known.vocab_size,
        known.num_hidden_layers,
        known.hidden_size,
        known.num_attention_heads,
        known.intermediate_size,
        known.embedding_size,
        share,
        known.hidden_dropout_prob,
        known.pad_token_id,
    )
    config = sizes.config(share)
    config.max_position_embeddings = known.max_position_embeddings
    return Electra(package.ElectraForMaskedLM(config), discriminator)


def open_masked(folder: Path) -> MaskedModel:
    """A masked language model from a folder: BERT, or an ELECTRA generator.

    Raises:
        DataError: there is no such folder, or it holds another kind of model.
    """
    network = _opened(_transformers().AutoModelForMaskedLM, folder)
    if not hasattr(network, "generator_lm_head") and not hasattr(network, "cls"):
        raise DataError(f"{folder}: is a {type(network).__name__}; only BERT and ELECTRA can be trained on")
    return MaskedModel(network)


def _opened(kind: Any, folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json; name a folder that save_pretrained or `repulsive export` wrote")
    try:
        read_config(folder)  # refuses names of code to download, and sizes beyond the limit
        local = {"local_files_only": True, "trust_remote_code": False}
        with quietly(), offline():
            return kind.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, **local)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: cannot be opened as {kind.__name__} ({reason})") from None


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars of transformers within a block."""
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
        raise DataError("ELECTRA needs the package transformers: pip install 'repulsive[transformers]'") from None
