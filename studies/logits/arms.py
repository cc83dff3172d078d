"""The arms of the logits study, which are compared with plain training."""

from __future__ import annotations

from dataclasses import replace

from studies.logits.settings import Arm, Size

SIZES = {
    "tiny": Size(layers=4, heads=4, width=128, batch=32, length=256, steps=1500),
    "small": Size(layers=6, heads=8, width=256, batch=32, length=512, steps=2000),
    "probe": Size(layers=8, heads=8, width=512, batch=64, length=512, steps=1800),
}
RATES = {"tiny": (1e-3, 2e-3, 4e-3), "small": (1e-3, 2e-3, 4e-3), "probe": (5e-4, 1e-3, 2e-3)}

PLAIN = Arm("plain")
REPEL = Arm("repulsion 0.3", qk=0.3)

# Does repulsion between logits help, and is it the repulsion that helps?
DECIDE = (
    PLAIN,
    Arm("repulsion 0.1", qk=0.1),
    REPEL,
    Arm("repulsion 1", qk=1.0),
    Arm("repulsion 0.3, keys not centred", qk=0.3, centred=False),
    Arm("repulsion 0.3, after RoPE", qk=0.3, rotated=True),
    Arm("repulsion 0.3, QK and OV", qk=0.3, ov=0.3),
    Arm("attraction 0.1", qk=-0.1),
    Arm("attraction 0.3", qk=-0.3),
    Arm("wrong partner 0.3", qk=0.3, partner="next"),
    Arm("random force", qk=0.3, partner="noise"),
    Arm("q, k rate x 2", qk_rate=2.0),
    Arm("q, k rate x 0.5", qk_rate=0.5),
    Arm("q, k decay x 0", qk_decay=0.0),
    Arm("q, k decay x 4", qk_decay=4.0),
    Arm("decay 0.3", decay=0.3),
    Arm("QK-norm", norm=True),
    Arm("QK-norm, repulsion 0.3", norm=True, qk=0.3),
    Arm("DropHead 0.1", drop=0.1),
    Arm("10 % more steps", extra=0.1),
    Arm("ratio 0.1", qk=1.0, ratio=0.1),
    Arm("ratio 0.3", qk=1.0, ratio=0.3),
)

# Which part of the force matters?
MECHANISM = (
    PLAIN,
    REPEL,
    Arm("repulsion 3", qk=3.0),
    Arm("ratio 1", qk=1.0, ratio=1.0),
    Arm("ratio -0.3", qk=-1.0, ratio=0.3),
    Arm("positive pairs alone", qk=0.3, pairs="positive"),
    Arm("near pairs alone", qk=0.3, pairs="near"),
    Arm("RBF weights", qk=0.3, pairs="rbf"),
    Arm("force on q alone", qk=0.3, parts="q"),
    Arm("force on k alone", qk=0.3, parts="k"),
    Arm("first half of the layers", qk=0.3, layers="first"),
    Arm("last half of the layers", qk=0.3, layers="last"),
    Arm("first tenth of training", qk=0.3, phase=(0.0, 0.1)),
    Arm("first half of training", qk=0.3, phase=(0.0, 0.5)),
    Arm("second half of training", qk=0.3, phase=(0.5, 1.0)),
    Arm("OV alone 0.3", ov=0.3),
    Arm("attraction 1", qk=-1.0),
    Arm("wrong partner 1", qk=1.0, partner="next"),
    Arm("wrong partner -0.3", qk=-0.3, partner="next"),
    Arm("q, k start x 3", qk_scale=3.0),
    Arm("q, k start x 3, repulsion 0.3", qk_scale=3.0, qk=0.3),
    Arm("QK-norm, attraction 0.3", norm=True, qk=-0.3),
)

# What is the best strength, at learning rates whose optimum is inside the grid?
STRENGTH = (
    PLAIN,
    Arm("repulsion 0.01", qk=0.01),
    Arm("repulsion 0.03", qk=0.03),
    Arm("repulsion 0.1", qk=0.1),
    Arm("attraction 0.03", qk=-0.03),
    Arm("attraction 0.1", qk=-0.1),
    Arm("wrong partner 0.1", qk=0.1, partner="next"),
    Arm("QK-norm", norm=True),
    Arm("QK-norm, repulsion 0.1", norm=True, qk=0.1),
    Arm("q, k rate x 2", qk_rate=2.0),
    Arm("10 % more steps", extra=0.1),
)

_EARLY = (0.0, 0.1)
# What does the first tenth of training contribute, and for how many steps can a force be reused?
EARLY = (
    PLAIN,
    Arm("repulsion 0.1", qk=0.1),
    Arm("repulsion 0.1, first tenth", qk=0.1, phase=_EARLY),
    Arm("repulsion 0.1, first fiftieth", qk=0.1, phase=(0.0, 0.02)),
    Arm("repulsion 0.1, last half of the layers, first tenth", qk=0.1, layers="last", phase=_EARLY),
    Arm("attraction 0.1, first tenth", qk=-0.1, phase=_EARLY),
    Arm("wrong partner 0.1, first tenth", qk=0.1, partner="next", phase=_EARLY),
    Arm("random force, first tenth", qk=0.1, partner="noise", phase=_EARLY),
    Arm("q, k rate x 5, first tenth", qk_rate=5.0, rate_phase=_EARLY),
    Arm("q, k rate x 0.2, first tenth", qk_rate=0.2, rate_phase=_EARLY),
    Arm("repulsion 0.1, every 10", qk=0.1, every=10),
    Arm("repulsion 0.1, every 20", qk=0.1, every=20),
    Arm("RBF weights 0.1, every 10", qk=0.1, pairs="rbf", every=10),
    Arm("QK-norm", norm=True),
    Arm("QK-norm, repulsion 0.1, first tenth", norm=True, qk=0.1, phase=_EARLY),
    Arm("10 % more steps", extra=0.1),
)

SETS = {"early": EARLY, "decide": DECIDE, "mechanism": MECHANISM, "strength": STRENGTH}


def named(names: str) -> tuple[Arm, ...]:
    """Find the arms of a set, or those with the given names, separated by semicolons."""
    if names in SETS:
        return SETS[names]
    known = {arm.name: arm for arms in SETS.values() for arm in arms}
    return tuple(replace(known[name.strip()]) for name in names.split(";"))
