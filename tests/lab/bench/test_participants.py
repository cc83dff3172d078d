"""Participants share one model and one optimizer: a rule is attached in its own turns only, also in compiled models."""


import pytest
import torch

from repulsive import SGLD, SVGD
from repulsive.lab.bench.participants import Participant
from repulsive.lab.bench.presets import PRESETS
from repulsive.lab.bench.rules import Case
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


def train_in_turns(shared, order):
    """Give participants turns in this order; return the handles attached and the hooks in every step."""
    seen = []
    for one in order:
        whole = one.step

        def step(whole=whole):
            handles = [other for other in order if other.handle is not None and other.handle.attached]
            seen.append((list(dict.fromkeys(handles)), hooks_of(shared)))
            return whole()

        one.step = step
        one.turn()
        del one.step
    return seen


def test_a_rule_is_attached_in_its_own_turns_only():
    shared = tiny_model("llama")
    plain = Participant(shared, steps=1)
    paper, noise, logits = (Participant(shared, case, steps=1) for case in (Case(SVGD()), Case(SGLD()), LOGITS))
    assert hooks_of(shared) == (0, 0, 0)
    for one in (paper, plain, logits, noise, plain, plain, logits, paper):
        for attached, hooks in train_in_turns(shared, [one]):
            assert attached == ([] if one is plain else [one])
            assert hooks[:2] == ((0, 0) if one is plain else (1, 1))
            assert (hooks[2] > 0) == (one is logits)
        assert hooks_of(shared) == (0, 0, 0)
    assert paper.handle.steps == 4 and noise.handle.steps == 2
    assert logits.handle.steps == logits.start + 3


@pytest.mark.parametrize("name", PRESETS)
def test_plain_turns_are_plain_and_the_rule_acts_in_its_turns(name):
    """A detached rule changes no weight, and an attached one does."""
    ends = []
    for order in ([0, 0], [0, 0], [0, 1], [1, 0]):
        shared = tiny_model(name, **NO_DROPOUT.get(name, {}))
        team = [Participant(shared, case, steps=1) for case in (None, Case(SVGD(alpha=1.0)))]
        start = weights(shared)
        for number in order:
            team[number].turn()
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
        logits, *rest = (Participant(shared, case, steps=2) for case in (LOGITS, *others))
        for _ in range(3):
            logits.turn()
            for one in rest:
                one.turn()
        handle = logits.handle
        results.append((handle.steps, handle._logits.renewals, {group.step for group in handle.report()}))
    assert results[0] == results[1]
    assert results[0][1] == 1 + 3, "the first step has no force yet; then one renewal per turn"


class CountingBackend:
    """A backend of torch.compile that runs graphs as they are; `graphs` has the sampling calls in each graph."""

    def __init__(self, monkeypatch):
        self.graphs = []
        monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: self)
        torch._dynamo.reset()

    def __call__(self, graph, inputs):
        self.graphs.append(sum("take_tokens" in str(node.target) for node in graph.graph.nodes))
        return graph


def test_all_rules_between_weights_use_one_compiled_graph(monkeypatch):
    backend = CountingBackend(monkeypatch)
    shared = tiny_model("llama", compiled=True)
    cases = {"paper": Case(SVGD()), "auto": Case(SVGD(alpha="auto")), "sgld": Case(SGLD())}
    team = warm_up(shared, cases, 1, 1, 0, lambda line: None).participants
    for _ in range(2):
        for one in team.values():
            one.turn()
    assert backend.graphs == [0]
    assert not any(one.has_own_graph for one in team.values())
    assert team["paper"].handle.steps == 6


def test_a_compiled_rule_that_reads_tokens_has_a_graph_of_its_own(monkeypatch):
    """The plain graph never samples, the other graph does, and switching between them compiles nothing."""
    backend = CountingBackend(monkeypatch)
    calls = []
    whole = Samples.take
    monkeypatch.setattr(Samples, "take", lambda self, *args: (calls.append(self), whole(self, *args)))
    shared = tiny_model("llama", compiled=True)
    cases = {"logits": LOGITS, "other logits": Case(SVGD(space="logits", tokens=64)), "paper": Case(SVGD())}
    team = warm_up(shared, cases, 1, 2, 0, lambda line: None).participants
    assert [team[name].has_own_graph for name in cases] == [True, True, False]
    graphs = len(backend.graphs)
    assert backend.graphs[0] == 0 and set(backend.graphs[1:]) == {2}  # q and k of one layer
    for _ in range(3):
        for name in ("plain", "logits", "plain again", "paper", "other logits", "plain"):
            calls.clear()
            team[name].turn()
            if "logits" in name:
                own = team[name].handle._logits
                assert len(calls) == 2 and all(one is own.sampler.taken for one in calls)
            else:
                assert not calls
    assert len(backend.graphs) == graphs
    for name in ("logits", "other logits"):
        assert team[name].handle._logits.renewals == 1 + 2 + 3


def test_a_compiled_model_takes_the_same_steps(monkeypatch):
    """`repel` finds the heads of a compiled model, and both have the same weights at the end."""
    CountingBackend(monkeypatch)
    ends = []
    for compiled in (True, False):
        shared = tiny_model("llama", compiled=compiled)
        for one in [Participant(shared, case, steps=1) for case in (Case(SVGD()), LOGITS)]:
            one.turn()
        ends.append(weights(shared))
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_inductor_compiles_both_graphs():
    torch._dynamo.reset()
    shared = tiny_model("llama", compiled=True)
    plain, logits = (Participant(shared, case, steps=1) for case in (None, LOGITS))
    for _ in range(2):
        plain.turn()
        logits.turn()
    assert logits.handle._logits.renewals == 3 and logits.handle._logits.sampler.is_compiled
