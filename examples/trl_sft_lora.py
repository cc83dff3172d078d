"""Supervised fine-tuning with TRL and LoRA: the adapters of the heads repel each other.

    python examples/trl_sft_lora.py

`SFTTrainer` is a Trainer of transformers, so `RepulsiveCallback` works in it. LoRA freezes the weights of the model and
trains `lora_A` and `lora_B` of q, k and v; the rows of `lora_B` that write into head i are head i. They start at zero,
so the first similarity is measured after some steps. A small Llama with grouped key-value heads learns to answer
"mirror a b c" with "c b a". Prints for each training the loss, and the mean cosine between the heads' adapters at the
first and at the last measurement. Needs `pip install -e ".[transformers,peft]" trl`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from repulsive import SVGD
from repulsive.integrations.transformers import RepulsiveCallback

LETTERS = "abcdefgh"
# Three times the default ratio of 0.01: heads then spread within the few steps of an example.
RULES = {"plain": None, "repulsive": SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0)}


def mirrors(count: int, seed: int) -> Dataset:
    source = random.Random(seed)
    words = [source.choices(LETTERS, k=4) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": f"mirror {' '.join(w)} answer ", "completion": " ".join(reversed(w))} for w in words]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[EOS]", "mirror", "answer", *LETTERS]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj"],
        modules_to_save=["embed_tokens", "lm_head"],  # the model is not pre-trained
        task_type="CAUSAL_LM",
    )
    for name, rule in RULES.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                folder,
                max_steps=steps,
                per_device_train_batch_size=32,
                learning_rate=1e-2,
                logging_steps=max(1, steps // 8),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
            )
            trainer = SFTTrainer(
                LlamaForCausalLM(config),
                arguments,
                train_dataset=mirrors(1000, seed=1),
                processing_class=tokenizer(),
                peft_config=adapters,
                callbacks=[RepulsiveCallback(rule, measure_every=max(1, steps // 8), verbose=False)],
            )
            trainer.train()
        logs = [line for line in trainer.state.log_history if "head_similarity" in line]
        first, last = logs[1], logs[-1]  # at the first measurement all adapters are zero
        heads = f"mean cosine between heads {first['head_similarity']:+.3f} -> {last['head_similarity']:+.3f}"
        print(f"{name:10} loss {logs[0]['loss']:.3f} -> {last['loss']:.3f}  {heads}", flush=True)


if __name__ == "__main__":
    main()
