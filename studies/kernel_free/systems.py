"""The systems of the study: recipes, and sizes that a CPU can train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN, PUBLISHED, KERNEL_FREE, NUDGED = "plain", "published", "kernel-free", "published, nudged"
ARMS = (PLAIN, PUBLISHED, KERNEL_FREE, NUDGED)
_LAST = "training.average=1"  # keep the weights of the last step, so that all runs have the same number of steps
_NO_TEXTS = ("search.beam=1", "search.longest=1")  # the study compares losses; generating texts would only take time


@dataclass(frozen=True)
class System:
    """One system of the table.

    Args:
        title: name in the table.
        about: data and size, for the table.
        recipes: prefix of the names of its recipes, such as "lm/toy-".
        data: name of its folder of prepared data.
        changes: `key=value` changes of all its recipes.
        methods: arm -> method, the rest of a recipe's name; the nudged arm has the method of the published rule.
        repelled: further changes of the recipes with a rule.
        seeds: number of seeds; None: as many as the command line says.
    """

    title: str
    about: str
    recipes: str
    data: str
    changes: tuple[str, ...] = ()
    methods: Mapping[str, str] = field(
        default_factory=lambda: {PLAIN: "ma", PUBLISHED: "svgd", KERNEL_FREE: "kernel-free"}
    )
    repelled: tuple[str, ...] = ()
    seeds: int | None = None

    def recipe(self, arm: str) -> str:
        """Name of the recipe of an arm."""
        return self.recipes + self.methods[PUBLISHED if arm == NUDGED else arm]

    def all_changes(self, arm: str) -> tuple[str, ...]:
        """Changes of the recipe of an arm."""
        return (_LAST, *self.changes, *(() if arm == PLAIN else self.repelled))


_AGE = ("model.units=50", "model.mlp=300", "training.epochs=5")
_AGE_ABOUT = "Age, 11,858 texts; LSTM of 50 units per direction, additive attention; Adam"

SYSTEMS: dict[str, System] = {
    "age": System(
        "sentence classifier, ratio 1",
        f"{_AGE_ABOUT}; the recipe's rule, which holds repulsion at the size of the gradient",
        "age/",
        "age",
        _AGE,
        seeds=5,
    ),
    "age-weak": System(
        "sentence classifier, ratio 0.03",
        f"{_AGE_ABOUT}; repulsion held at 3 % of the gradient, so that heads stay closer to each other",
        "age/",
        "age",
        _AGE,
        repelled=("method.ratio=0.03",),
    ),
    "age-constants": System(
        "sentence classifier, alpha 0.01",
        f"{_AGE_ABOUT}; epsilon 0.1 and alpha 0.01, the constants of the published rule",
        "age/",
        "age",
        _AGE,
        repelled=("method.stepsize=0.1", "method.alpha=0.01"),
    ),
    "lm": System(
        "language model, width 64",
        "generated text as bytes; decoder of 2 layers; AdamW, batches of 16 x 64 bytes",
        "lm/toy-",
        "lm-toy",
        seeds=5,
    ),
    "lm-wide": System(
        "language model, width 128",
        "the same with twice the width",
        "lm/toy-",
        "lm-toy",
        ("model.width=128",),
    ),
    "graphs": System(
        "graph writer",
        "the first half of the training texts of WebNLG; graph Transformer of 2 layers, width 64; SGD with momentum",
        "webnlg/tiny-",
        "webnlg",
        ("data.share=0.5", "training.epochs=2", *_NO_TEXTS),
        {PLAIN: "gw", PUBLISHED: "rma", KERNEL_FREE: "kernel-free"},
    ),
    "electra": System(
        "ELECTRA",
        "20 MB of Wikipedia; 2 layers, width 64, of which the discriminator's first repels (epsilon 0.01, alpha 0.1); "
        "AdamW, batches of 8 x 128 pieces; loss of the discriminator",
        "electra/tiny-",
        "pretrain",
        ("data.steps=100", "training.epochs=3", "training.batch=8", "optimizer.warmup=60"),
    ),
    "translation": System(
        "translation",
        "10,150 pairs of Multi30k; Transformer of 2+2 layers, width 128; AdamW, batches of 1,024 tokens",
        "multi30k/",
        "multi30k",
        ("data.share=0.35", "training.epochs=3", "training.batch=1024", "optimizer.warmup=100", *_NO_TEXTS),
    ),
}
