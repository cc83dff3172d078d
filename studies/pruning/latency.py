"""Measure the latency of pruned models: prefill, and decoding one token at a time with a KV cache.

    PYTHONPATH=src python -m studies.pruning.latency --device cuda --out latency.json
    PYTHONPATH=src python -m studies.pruning.latency_tables latency.json

Weights are random, which does not change the time. Each model is pruned, saved, and loaded by plain transformers. All
variants of a shape are timed in rounds, each round in another order, so that a slower moment of the machine does not
favour one of them. Needs torch and transformers only; no network, data or other results.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.portable_pruning import Selection, prune_portably, select_heads
from repulsive.errors import SelectionError

# Llama requires a width that the number of heads divides. The 1B shape allows 75 % and 50 % of its heads; that of
# Llama 3.2 1B, with 32 heads at width 2048, allows 50 % only.
SHAPES: dict[str, dict[str, int | bool]] = {
    "smollm2-135m": {
        "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-1b": {
        "num_hidden_layers": 16, "hidden_size": 2304, "num_attention_heads": 24, "num_key_value_heads": 8,
        "head_dim": 96, "intermediate_size": 6144, "vocab_size": 32000, "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 6, "intermediate_size": 64, "vocab_size": 100, "tie_word_embeddings": True,
    },
}  # fmt: skip
FEWEST_ROUNDS = 3


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="bfloat16 on cuda, float32 on cpu by default")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["smollm2-135m", "llama-1b"])
    parser.add_argument("--keep", nargs="+", type=int, default=[75, 50], help="percent of the heads to keep")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens to decode in each round")
    parser.add_argument("--rounds", type=int, default=40, help="most rounds of a shape")
    parser.add_argument("--seconds", type=float, default=70, help="start no round after this time, but do at least 3")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(words)


def study(arguments: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Measure all shapes and return the results as plain values."""
    import transformers

    start = time.monotonic()
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    is_cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        "dtype": str(dtype).removeprefix("torch."),
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "studies.pruning.latency", *_without_paths(words)]),
        "shapes": [],
    }
    for number, name in enumerate(arguments.shapes, 1):
        deadline = start + arguments.seconds * number / len(arguments.shapes)
        result["shapes"].append(measure_shape(name, device, dtype, deadline, arguments))
        print(f"{time.monotonic() - start:.0f} s: {name} measured", flush=True)
        if is_cuda:
            torch.cuda.empty_cache()
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def measure_shape(
    name: str, device: torch.device, dtype: torch.dtype, deadline: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Build the variants of a shape and time them in rounds until the deadline."""
    variants = build_variants(SHAPES[name], arguments.keep, device, dtype)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(SHAPES[name]["vocab_size"])
    prompts = {
        batch: torch.randint(vocabulary, (batch, arguments.prompt), generator=generator).to(device)
        for batch in arguments.batches
    }
    cases = [(variant, batch) for batch in arguments.batches for variant in variants]
    for variant, batch in cases:  # warm-up, and what needs no repetition
        model = variant["model"]
        time_once(model, prompts[batch], arguments.tokens)
        variant["batches"][str(batch)] = {
            "prefill_ms": [],
            "decode_ms": [],
            **kernel_milliseconds(model, prompts[batch], arguments.tokens),
        }
        variant["cache_bytes"] = cache_bytes(prefill(model, prompts[batch]).past_key_values) // prompts[batch].numel()
    rounds = 0
    while rounds < arguments.rounds and (rounds < FEWEST_ROUNDS or time.monotonic() < deadline):
        shift = rounds % len(cases)
        for variant, batch in cases[shift:] + cases[:shift]:
            times = time_once(variant["model"], prompts[batch], arguments.tokens)
            for key, value in zip(("prefill_ms", "decode_ms"), times, strict=True):
                variant["batches"][str(batch)][key].append(round(value, 4))
        rounds += 1
    for variant in variants:
        del variant["model"]
    return {"name": name, "rounds": rounds, **SHAPES[name], "variants": variants}


def build_variants(
    shape: dict[str, Any], keep: Sequence[int], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Make the whole model and its pruned versions; each is saved, and loaded by plain transformers.

    Heads are pruned in float32, in which the check against the ablated model is strict.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=8192)).eval()
    heads = Heads(model)
    example = {"input_ids": torch.randint(int(shape["vocab_size"]), (2, 8), generator=torch.Generator().manual_seed(1))}
    example = {key: value.to(device) for key, value in example.items()}
    scores = torch.rand(
        len(heads.layers), int(shape["num_attention_heads"]), generator=torch.Generator().manual_seed(2)
    )

    def load(percent: int, made: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            made.to(dtype).save_pretrained(folder)
            loaded = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        return {
            "keep": percent,
            "heads": loaded.config.num_attention_heads,
            "kv_heads": loaded.config.num_key_value_heads,
            "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
            "model": loaded,
            "batches": {},
        }

    pruned = [
        load(percent, prune_portably(heads, fewest_kv_heads(heads, scores, percent / 100), example)) for percent in keep
    ]
    return [load(100, model), *pruned]  # the whole model last, because `load` changes its type


def fewest_kv_heads(heads: Heads, scores: Tensor, keep: float) -> Selection:
    """Select heads such that the KV cache becomes as small as the number of query heads allows."""
    selection = select_heads(heads, scores, keep)
    for kv_heads in range(1, selection.kv_heads[1]):
        try:
            other = select_heads(heads, scores, keep, kv_heads)
        except SelectionError:  # the config accepts no such number
            continue
        if other.heads == selection.heads:
            return other
    return selection


@torch.inference_mode()
def prefill(model: Any, ids: Tensor) -> Any:
    """Read the prompt [B, T] and return the last logits and the cache."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1)


@torch.inference_mode()
def decode(model: Any, output: Any, tokens: int) -> None:
    """Decode greedily, one token at a time, after `prefill`."""
    for _ in range(tokens):
        token = output.logits[:, -1:].argmax(-1)  # [B, 1]
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)


def time_once(model: Any, ids: Tensor, tokens: int) -> tuple[float, float]:
    """Milliseconds of a prefill, and of decoding one token (mean over `tokens`)."""
    start = _now(ids.device)
    output = prefill(model, ids)
    middle = _now(ids.device)
    decode(model, output, tokens)
    return 1e3 * (middle - start), 1e3 * (_now(ids.device) - middle) / tokens


def kernel_milliseconds(model: Any, ids: Tensor, tokens: int) -> dict[str, float | None]:
    """Time in which the GPU computes during a prefill and one decoded token; None on a CPU or without a profiler.

    The difference from the latency is the time in which the GPU waits for Python to launch the next operation.
    """
    output = prefill(model, ids)
    pre = _profiled(lambda: prefill(model, ids), ids.device)
    each = _profiled(lambda: decode(model, output, tokens), ids.device)
    return {"prefill_kernel_ms": pre, "decode_kernel_ms": None if each is None else each / tokens}


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values in a cache of transformers."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def _profiled(function: Callable[[], Any], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            function()
            torch.cuda.synchronize(device)
        total = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    except (RuntimeError, AttributeError):  # no permission to profile, or another version of its interface
        return None
    return total or None


def _without_paths(words: Sequence[str]) -> list[str]:
    """Replace the value of --out, which differs between machines."""
    return ["FILE" if before == "--out" else word for before, word in zip(["", *words], words, strict=False)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    result = study(arguments, sys.argv[1:] if words is None else words)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out} after {result['seconds']} s. To make the tables from it, in the repository:")
    print(f"    PYTHONPATH=src python -m studies.pruning.latency_tables {shlex.quote(str(arguments.out))}")
    print("This writes results/pruning/latency.json and .md. The section on latency in docs/pruning.md must agree")
    print("with the new numbers. Then commit the three files.")


if __name__ == "__main__":
    main()
