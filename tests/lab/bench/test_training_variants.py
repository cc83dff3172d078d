"""Training variants share one model and optimizer: a rule is attached in its own turns only, also if compiled."""

import pytest
import torch

from repulsive import SGLD, SVGD
from repulsive.lab.bench.presets import PRESETS
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.training_variants import TrainingVariant
from repulsive.lab.bench.warm_up import warm_up
from repulsive.repulsion.logits.samples import Samples
from tests.lab.bench.tiny_models import tiny_model

pytest.importorskip("transformers")

NO_DROPOUT = {
    "bert-base": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
LOGITS = Case(SVGD(space="logits"))


def weights(shared):
    return {name: value.clone() for name, value in shared.model.state_dict().items()}


def hooks_of(shared):
    """Numbers of hooks: of the optimizer, and of all modules."""
    modules = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in shared.model.modules())
    if shared.forward is not shared.model:
        modules += len(shared.forward._forward_pre_hooks)
    optimizer = shared.optimizer
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks), modules


def test_a_rule_is_attached_in_its_own_turns_only(monkeypatch):
    shared = tiny_model("llama")
    cases = {"plain": None, "paper": Case(SVGD()), "sgld": Case(SGLD()), "logits": LOGITS}
    variants = {name: TrainingVariant(shared, case, steps=1) for name, case in cases.items()}
    assert hooks_of(shared) == (0, 0, 0)
    steps, whole = [], TrainingVariant.step

    def step(self):
        names = [name for name, one in variants.items() if one.handle is not None and one.handle.attached]
        steps.append((names, hooks_of(shared)))
        return whole(self)

    monkeypatch.setattr(TrainingVariant, "step", step)
    for turn in ("paper", "plain", "logits", "sgld", "plain", "plain", "logits", "paper"):
        steps.clear()
        variants[turn].run_turn()
        assert len(steps) == (3 if turn == "logits" else 2)
        for names, (before, after, modules) in steps:
            assert names == ([] if turn == "plain" else [turn])
            assert before == after == len(names) and (modules > 0) == (turn == "logits")
        assert hooks_of(shared) == (0, 0, 0)
    assert variants["paper"].handle.steps == 4 and variants["sgld"].handle.steps == 2
    assert variants["logits"].handle.steps == variants["logits"].start + 3


def test_a_rule_is_detached_after_an_error():
    shared = tiny_model("llama")
    paper, other = (TrainingVariant(shared, Case(SVGD()), steps=1) for _ in range(2))
    paper.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        paper.run_turn()
    assert hooks_of(shared) == (0, 0, 0)
    other.run_turn()  # repel refuses heads that another handle repels


def test_no_warning_about_handles_without_a_step(recwarn):
    TrainingVariant(tiny_model("llama"), Case(SVGD()), steps=1)
    assert not [warning for warning in recwarn if "never took a step" in str(warning.message)]


@pytest.mark.parametrize("name", PRESETS)
def test_plain_turns_are_plain_and_the_rule_acts_in_its_turns(name):
    """A detached rule changes no weight, and an attached one does."""
    ends = []
    for order in ([0, 0], [0, 0], [0, 1], [1, 0]):
        shared = tiny_model(name, **NO_DROPOUT.get(name, {}))
        variants = [TrainingVariant(shared, case, steps=1) for case in (None, Case(SVGD(alpha=1.0)))]
        start = weights(shared)
        for number in order:
            variants[number].run_turn()
            ends.append(weights(shared))
    for key, value in ends[1].items():
        torch.testing.assert_close(value, ends[3][key], rtol=0, atol=1e-6)  # two plain trainings
        torch.testing.assert_close(ends[0][key], ends[4][key], rtol=0, atol=1e-6)  # the plain turn before the rule's
    moved = [key for key, value in start.items() if not torch.equal(value, ends[0][key])]

    def differs(one, other):
        return any((one[key] - other[key]).abs().max() > 1e-5 for key in moved)

    assert differs(ends[1], ends[5]), "the rule changed nothing, so its cost would be that of nothing"
    assert differs(ends[0], ends[6])


def test_a_rule_between_other_turns_does_the_same_as_alone():
    """The state of a handle does not depend on turns of other rules: counter, measurements and renewals."""
    results = []
    for others in ([], [Case(SVGD()), Case(SVGD(alpha="auto"), max_norm=1.0)]):
        shared = tiny_model("llama")
        logits, *rest = (TrainingVariant(shared, case, steps=2) for case in (LOGITS, *others))
        for _ in range(3):
            logits.run_turn()
            for one in rest:
                one.run_turn()
        handle = logits.handle
        results.append((handle.steps, handle._logits.renewals, {group.step for group in handle.report()}))
    assert results[0] == results[1]
    assert results[0][1] == 1 + 3, "the first step has no force yet; then one renewal per turn"


class CountingBackend:
    """A backend of torch.compile that runs graphs as they are; `graphs` has the sampling calls in each graph."""

    def __init__(self, monkeypatch):
        self.graphs = []
        monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: self)

    def __call__(self, graph, inputs, config_patches):
        assert not config_patches["triton.cudagraphs"]
        self.graphs.append(sum("take_tokens" in str(node.target) for node in graph.graph.nodes))
        return graph


@pytest.mark.slow
def test_all_rules_between_weights_use_one_compiled_graph(monkeypatch):
    backend = CountingBackend(monkeypatch)
    shared = tiny_model("llama", compiled=True)
    cases = {"paper": Case(SVGD()), "auto": Case(SVGD(alpha="auto")), "sgld": Case(SGLD())}
    variants = warm_up(shared, cases, 1, 1, 0, lambda line: None).variants
    for _ in range(2):
        for one in variants.values():
            one.run_turn()
    assert backend.graphs == [0]
    assert not any(one.has_own_graph for one in variants.values())
    assert variants["paper"].handle.steps == 6


@pytest.mark.parametrize("tokens", [(512,), pytest.param((512, 64), marks=pytest.mark.slow)])
def test_a_compiled_rule_that_reads_tokens_has_a_graph_of_its_own(tokens, monkeypatch):
    """The plain graph never samples; each rule has one graph that does and one that does not, compiled before turns."""
    backend = CountingBackend(monkeypatch)
    calls, whole = [], Samples.take
    monkeypatch.setattr(Samples, "take", lambda self, *args: (calls.append(self), whole(self, *args)))
    shared = tiny_model("llama", compiled=True)
    readers = {f"logits {count}": Case(SVGD(space="logits", tokens=count)) for count in tokens}
    variants = warm_up(shared, {**readers, "paper": Case(SVGD())}, 1, 2, 0, lambda line: None).variants
    assert [name for name, one in variants.items() if one.has_own_graph] == list(readers)
    graphs = len(backend.graphs)
    assert sorted(backend.graphs) == [0] * (1 + len(readers)) + [2] * len(readers)  # 2: q and k of one layer
    for _ in range(2):
        for name in ("plain", *readers, "plain again", "paper", *readers, "plain"):
            calls.clear()
            variants[name].run_turn()
            if name in readers:  # two samples in the one step that renews
                assert len(calls) == 2 and all(one is variants[name].handle._logits.sampler.taken for one in calls)
            else:
                assert not calls
    assert len(backend.graphs) == graphs
    for name in readers:
        assert variants[name].handle._logits.renewals == 1 + 2 + 4


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps(monkeypatch):
    """`repel` finds the heads of a compiled model, and both have the same weights at the end."""
    CountingBackend(monkeypatch)
    ends = []
    for compiled in (True, False):
        shared = tiny_model("llama", compiled=compiled)
        for one in [TrainingVariant(shared, case, steps=1) for case in (Case(SVGD()), LOGITS)]:
            one.run_turn()
        ends.append(weights(shared))
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_cuda_graphs_change_no_step():
    """The loss repeats, and every step that renews the force finds new tokens: replays do not skip the sampling."""
    ends = []
    for cuda_graphs in (True, False):
        shared = tiny_model("llama", compiled=True, device="cuda", cuda_graphs=cuda_graphs)
        plain, logits = (TrainingVariant(shared, case, steps=1) for case in (None, LOGITS))
        for _ in range(4):
            plain.run_turn()
            logits.run_turn()
        ends.append((weights(shared), logits.handle._logits.renewals))
    assert ends[0][1] == ends[1][1] == 1 + 4
    for key, value in ends[1][0].items():
        torch.testing.assert_close(ends[0][0][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_inductor_compiles_both_graphs():
    shared = tiny_model("llama", compiled=True)
    plain, logits = (TrainingVariant(shared, case, steps=1) for case in (None, LOGITS))
    for _ in range(2):
        plain.run_turn()
        logits.run_turn()
    assert logits.handle._logits.renewals == 3 and logits.handle._logits.sampler.is_compiled
