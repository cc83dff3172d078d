"""A bidirectional LSTM over padded sentences, in two launches instead of several per word.

`two_way` computes the same as two `nn.LSTM` modules. On a GPU, Triton kernels (`lstm_kernels`) process whole sentences;
`REPULSIVE_KERNELS=eager|triton` chooses between them and the modules, which are the reference implementation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from repulsive.triton_setting import is_triton_requested, use_triton

LARGEST = 512  # units; larger layers use cuDNN
HELD = 160  # maximum number of padded units whose 16-bit weights fit in shared memory
ROOMY = (9, 10)  # major compute capabilities with 227 KB of shared memory
ROWS = 16  # sentences per Triton program: the height of the matrix units

# Launch settings, forward and backward: WIDTH units per tile, DEPTH terms of a sum, STAGES of the pipeline.
HELD_LAUNCH: tuple[dict[str, int], dict[str, int]] = ({"num_warps": 8}, {"num_warps": 8})
STREAMED_LAUNCH: dict[int, tuple[dict[str, int], dict[str, int]]] = {  # by bytes of a weight
    2: (
        {"WIDTH": 64, "DEPTH": 64, "STAGES": 4, "num_warps": 8},
        {"WIDTH": 64, "DEPTH": 256, "STAGES": 4, "num_warps": 8},
    ),
    4: (
        {"WIDTH": 32, "DEPTH": 64, "STAGES": 4, "num_warps": 8},
        {"WIDTH": 64, "DEPTH": 128, "STAGES": 4, "num_warps": 8},
    ),
}


def two_way(words: Tensor, ends: Tensor, forwards: nn.LSTM, backwards: nn.LSTM) -> Tensor:
    r"""Compute two-way states, [B, T, E] -> [B, T, 2u]: $c_t = f_t c_{t-1} + i_t g_t$, $h_t = o_t \tanh c_t$.

    The backward direction reads each sentence reversed, so padding comes last in both. Shapes depend on the batch
    alone: there is no packing, and no synchronisation with the device. In float32 the recurrent product has TF32
    precision (10 bits) if `torch.backends.cudnn.allow_tf32`, else full precision. Under autocast it has bfloat16
    precision (8 bits), where cuDNN uses float16.

    Args:
        words: word vectors.
        ends: number of words of each sentence, [B].
        forwards: LSTM of the forward direction, a single layer with `batch_first`.
        backwards: LSTM of the backward direction, of the same size.

    Raises:
        ConfigError: `REPULSIVE_KERNELS` is misspelt, or asks for Triton, which is not installed.
    """
    if torch.compiler.is_compiling():  # breaks the compiled graph here
        return torch.compiler.disable(_two_way)(words, ends, forwards, backwards)
    return _two_way(words, ends, forwards, backwards)


def _two_way(words: Tensor, ends: Tensor, forwards: nn.LSTM, backwards: nn.LSTM) -> Tensor:
    device = words.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else words.dtype
    supported = use_triton(device, oldest=(3, 6)) and _supported(words, kind, forwards, backwards)
    # Larger layers are streamed only on request: a single process is at least as fast with cuDNN.
    if not supported or not (is_triton_requested() or _Shape.of(words, kind, forwards.hidden_size).held):
        return _by_modules(words, ends, forwards, backwards)
    weights = [weight for lstm in (forwards, backwards) for weight in lstm._flat_weights if weight is not None]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (words, *weights))
    return _TwoWay.apply(words.to(kind), ends, save, *weights)


def _by_modules(words: Tensor, ends: Tensor, forwards: nn.LSTM, backwards: nn.LSTM) -> Tensor:
    places, ends = torch.arange(words.shape[1], device=words.device), ends.unsqueeze(1)  # [T], [B, 1]
    mirrored = torch.where(places < ends, ends - 1 - places, places).unsqueeze(-1)  # [B, T, 1]
    with _float32_if_needed(words):
        ahead = forwards(words)[0]  # [B, T, u]
        back = backwards(words.gather(1, mirrored.expand_as(words)))[0]  # [B, T, u]
    return torch.cat([ahead, back.gather(1, mirrored.expand_as(back))], -1)


def _float32_if_needed(words: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on CPUs without bfloat16 instructions, where oneDNN has no LSTM in bfloat16 and raises."""
    unsupported = words.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if unsupported and words.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


def _supported(words: Tensor, kind: torch.dtype, *lstms: nn.LSTM) -> bool:
    """Whether the kernels support these layers: plain, of one size, without hooks, of a known dtype."""
    cast = torch.is_autocast_enabled(words.device.type)
    plain = all(
        (lstm.num_layers, lstm.bidirectional, lstm.proj_size, lstm.bias, lstm.batch_first) == (1, False, 0, True, True)
        and (lstm.input_size, lstm.hidden_size) == (words.shape[-1], lstms[0].hidden_size)
        and not (lstm._forward_hooks or lstm._forward_pre_hooks or lstm._backward_hooks or lstm._backward_pre_hooks)
        and all(x is not None and x.device == words.device and (cast or x.dtype == kind) for x in lstm._flat_weights)
        for lstm in lstms
    )
    # Triton's interpreter, on CPUs, has no bfloat16.
    dtype = kind in (torch.float32, torch.float16) or (kind == torch.bfloat16 and words.is_cuda)
    return plain and dtype and lstms[0].hidden_size <= LARGEST and words.numel() > 0


class _Shape(NamedTuple):
    """Sizes and dtypes of one call."""

    batch: int
    length: int
    units: int
    padded: int
    held: bool  # weights stay in shared memory
    operand: torch.dtype  # dtype of the recurrent product

    @classmethod
    def of(cls, words: Tensor, kind: torch.dtype, units: int) -> _Shape:
        operand = kind
        if operand == torch.float32 and torch.backends.cudnn.allow_tf32:
            operand = torch.float16  # the 10 bits of TF32 in half the bytes; states and weights fit its range
        padded = -(-units // 32) * 32
        roomy = not words.is_cuda or torch.cuda.get_device_capability(words.device)[0] in ROOMY
        held = operand.itemsize == 2 and padded <= HELD and roomy
        if not held and padded > 32:
            padded = -(-units // 64) * 64
        return cls(words.shape[0], words.shape[1], units, padded, held, operand)


class _TwoWay(torch.autograd.Function):
    """Autograd function of the Triton kernels and the large matrix products around them."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, ends: Tensor, save: bool, *weights: Tensor) -> Tensor:
        from repulsive.lab.layers.lstm_kernels import held, streamed

        ctx.shape = shape = _Shape.of(words, words.dtype, weights[1].shape[1])
        batch, length, units, padded = shape[:4]
        inputs, bias = words.new_zeros(2, 4, padded, words.shape[2]), words.new_zeros(2, 4, padded)
        recurrent = words.new_zeros(2, 4, padded, padded, dtype=shape.operand)
        for way, (weight_ih, weight_hh, bias_ih, bias_hh) in enumerate((weights[:4], weights[4:])):
            inputs[way, :, :units].copy_(weight_ih.view(4, units, -1))
            recurrent[way, :, :units, :units].copy_(weight_hh.view(4, units, units))
            bias[way, :, :units].copy_((bias_ih + bias_hh).view(4, units))
        flat, inputs = words.reshape(batch * length, -1), inputs.view(8 * padded, -1)  # [B T, E], [8P, E]
        gates = torch.addmm(bias.view(-1), flat, inputs.T)  # [B T, 8P]
        states = words.new_empty(batch, length, 2, units)
        before = torch.empty_like(states)
        links = words.new_empty(batch, length, 2, 2 * padded)
        ends = ends.contiguous()
        tensors = [gates, recurrent, ends, states, before, links]
        if shape.held:
            _launch(held.held_forward, tensors, shape, HELD_LAUNCH[0], SAVE=save)
        else:
            tensors.append(words.new_empty(2, 2, batch, padded, dtype=torch.float32))
            _launch(streamed.streamed_forward, tensors, shape, _streamed_launch(shape, 0), SAVE=save)
        ctx.save_for_backward(flat, ends, inputs, recurrent, gates, before, links)
        ctx.kind = weights[0].dtype
        return states.view(batch, length, 2 * units)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from repulsive.lab.layers.lstm_kernels import held, streamed

        if torch.is_grad_enabled():
            raise RuntimeError("the LSTM kernels have no second derivative; set REPULSIVE_KERNELS=eager for one")
        shape = ctx.shape
        batch, length, units, padded = shape[:4]
        flat, ends, inputs, recurrent, gates, before, links = ctx.saved_tensors
        dgates = torch.empty_like(gates)  # [B T, 8P]
        tensors = [gates, recurrent, ends, links, grad.contiguous(), dgates]
        if shape.held:
            _launch(held.held_backward, tensors, shape, HELD_LAUNCH[1])
        else:
            tensors.append(gates.new_empty(3, 2, batch, padded, dtype=torch.float32))
            _launch(streamed.streamed_backward, tensors, shape, _streamed_launch(shape, 1))
        dwords = (dgates @ inputs).view(batch, length, -1) if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = [None] * 8
        if any(ctx.needs_input_grad[3:]):
            of_inputs = _outer(dgates.unsqueeze(1), flat.unsqueeze(1)).view(2, 4, padded, -1)
            of_recurrent = _outer(dgates.view(-1, 2, 4 * padded), before.view(-1, 2, units)).view(2, 4, padded, units)
            of_bias = dgates.sum(0).view(2, 4, padded)
            for way in range(2):
                for number, part in enumerate((of_inputs, of_recurrent, of_bias, of_bias)):
                    own = part[way, :, :units].to(ctx.kind, memory_format=torch.contiguous_format, copy=True)
                    grads[4 * way + number] = own.flatten(0, 1)
        return dwords, None, None, *grads


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Sum left[n, w] right[n, w]^T over n in parallel chunks: [N, W, P], [N, W, Q] -> [W, P, Q]."""
    rows = left.shape[0]
    pieces = next((count for count in (32, 16, 8, 4, 2) if rows % count == 0 and rows >= 512 * count), 1)
    tall = left.unflatten(0, (pieces, -1)).permute(0, 2, 3, 1)  # [pieces, W, P, n]
    flat = right.unflatten(0, (pieces, -1)).permute(0, 2, 1, 3)  # [pieces, W, n, Q]
    return (tall @ flat).sum(0, dtype=torch.float32)


def _streamed_launch(shape: _Shape, back: int) -> dict[str, Any]:
    settings = STREAMED_LAUNCH[shape.operand.itemsize][back]
    depth = (4 if back else 1) * shape.padded  # terms of the sum
    return settings | {
        "WIDTH": min(settings["WIDTH"], shape.padded),
        "DEPTH": min(settings["DEPTH"], depth),
        "PRECISION": "tf32x3",  # close to float32: two mantissas of 10 bits each
    }


def _launch(kernel: Any, tensors: list[Tensor], shape: _Shape, settings: dict[str, Any], **more: bool) -> None:
    import triton.language as tl

    kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[shape.operand]
    sizes = {"H": shape.units, "P": shape.padded, "ROWS": ROWS, "KIND": kind}
    with torch.cuda.device_of(tensors[0]):
        kernel[(-(-shape.batch // ROWS), 2)](*tensors, shape.batch, shape.length, **sizes, **settings, **more)
