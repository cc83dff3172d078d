"""Printed text: one line when attached, the table with `verbose=True`, and the printed form of a handle."""

import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from repulsive import SGLD, SPOS, SVGD, find_heads, repel
from repulsive.repulsion.display import short_rule


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def test_one_line_on_stderr(make_model, capsys):
    model = make_model(layers=12)
    repel(model, adam(model), "sphere")
    out, err = capsys.readouterr()
    assert out == "" and err == (
        "repulsive: Encoder, 12 attention layers x 4 heads, 36 groups (0 proved, 36 from the table), "
        "SVGD(stepsize='heads', alpha='auto', smoothing=0, space='sphere', ratio=0.01, act_every=4)\n"
    )


def test_a_wrapped_model_with_fewer_key_heads(capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = torch.compile(transformers.LlamaModel(config))
    repel(model, adam(model), None)
    expected = "repulsive: LlamaModel, 1 attention layer x 4/2 heads, 3 groups"
    assert re.match(
        expected + r" \(\d proved(, \d from the table)?\), no rule \(plain training, measured\)\n$",
        capsys.readouterr().err,
    )


def test_the_number_of_proved_groups_is_shown(make_model, capsys):
    from repulsive import find_heads

    model = make_model()
    groups = find_heads(model)
    for number, group in enumerate(groups):
        object.__setattr__(group, "proof", "proved" if number < 4 else "table")
    repel(model, adam(model), groups=groups)
    assert "6 groups (4 proved, 2 from the table), SVGD" in capsys.readouterr().err


def test_one_head_and_one_group(make_model, backward, capsys):
    model = make_model(heads=1, layers=1)
    handle = repel(model, adam(model), SGLD(), parts="q", allow_unproved=True)
    assert "1 attention layer x 1 head, 1 group (0 proved, 1 from the table), SGLD" in capsys.readouterr().err
    assert "1 group of heads, step 0" in str(handle)


def test_the_table_and_silence(make_model, capsys):
    model = make_model()
    repel(model, adam(model), verbose=True, layers="first")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 1 + 1 + 3 + 1
    assert lines[0].startswith("repulsive: Encoder, 1 attention layer x 4 heads") and "3 groups" in lines[-1]
    repel(model, adam(model), verbose=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (SVGD(), "SVGD(stepsize=0.1, alpha=0.01)"),
        (SVGD(space="logits"), "SVGD(stepsize=0.1, alpha=0.01, space='logits')"),
        (SVGD(kernel="hinge", space="sphere"), "SVGD(stepsize=0.1, alpha=0.01, kernel='hinge', space='sphere')"),
        (SPOS(noise="released"), "SPOS(stepsize=0.1, alpha=0.01, beta=1000000.0, noise='released')"),
        (SGLD(), "SGLD(stepsize=0.1, temperature=1.0)"),
    ],
)
def test_rules_in_short(rule, text):
    assert short_rule(rule) == text


def test_a_printed_handle_shows_start_and_now(make_model, backward):
    model = make_model()
    handle = repel(
        model, adam(model), SVGD(alpha="auto", ratio=0.5, space="sphere", smoothing=0), measure_every=10, verbose=False
    )
    assert str(handle).splitlines()[1:] == ["not measured yet"] and "not measured yet" in handle._repr_html_()
    for index in range(41):
        backward(model, index)
        handle.optimizer.step()
    title, _, start, now = str(handle).splitlines()
    assert title == f"{short_rule(handle.rule)}, 6 groups of heads, step 41"
    steps, ratios, similarities, largest = zip(*(line.split()[1:] for line in (start, now)), strict=True)
    assert steps == ("0", "40") and ratios == ("0.5", "0.5")
    reports = handle.report()
    assert float(similarities[1]) == pytest.approx(sum(one.similarity for one in reports) / 6, abs=1e-3)
    assert float(largest[1]) == pytest.approx(max(one.largest for one in reports), abs=1e-3)
    assert float(similarities[1]) < float(similarities[0]) - 0.1  # the effect of repulsion
    assert {one.step for one in handle.first_report()} == {0}
    page = handle._repr_html_()
    assert "<td>40</td>" in page and similarities[0] in page and "&#x27;sphere&#x27;" in page
    handle.remove()
    assert "not attached" in str(handle) and "not attached" in repr(handle)


def test_without_repulsion_heads_do_not_separate(make_model, backward):
    """The control of the test above."""
    model = make_model()
    handle = repel(model, adam(model), None, measure_every=10, verbose=False)
    for index in range(41):
        backward(model, index)
        handle.optimizer.step()
    start, now = (sum(one.similarity for one in found) / 6 for found in (handle.first_report(), handle.report()))
    assert abs(now - start) < 0.1


@pytest.mark.parametrize("rule", ["paper", SVGD("heads", alpha="auto", ratio=0.5, space="sphere", smoothing=0)])
def test_a_resumed_handle_prints_the_start_of_the_run(rule, make_model, backward):
    model = make_model()
    handle = repel(model, adam(model), rule, verbose=False)
    for index in range(30):
        backward(model, index)
        handle.optimizer.step()
    first = str(handle).splitlines()[2]
    state = json.loads(json.dumps(handle.state_dict()))
    later = repel(model, adam(model), rule, verbose=False)
    later.load_state_dict(state)
    assert str(later).splitlines()[2:] == [first]
    for index in range(25):
        backward(model, index)
        later.optimizer.step()
    lines = str(later).splitlines()
    assert lines[2] == first and first.split()[:2] == ["start", "0"] and len(lines) == 4
    assert int(lines[3].split()[1]) in (50, 54)  # due at 50; "auto" on the CPU measures in every step
    assert later.state_dict()["start"] == state["start"]


def test_a_state_without_the_start_of_the_run(make_model, backward):
    """States that were saved before they had it: the last measurement is shown, and never "not measured yet"."""
    model = make_model()
    handle = repel(model, adam(model), SVGD("heads", alpha="auto", smoothing=0), verbose=False)
    handle.load_state_dict(handle.state_dict() | {"steps": 30})
    for index in range(5):
        backward(model, index)
        handle.optimizer.step()
    assert [line.split()[:2] for line in str(handle).splitlines()[2:]] == [["now", "34"]]


def test_distributed_checkpoints_restore_the_start_of_the_run(make_model, backward, tmp_path):
    """Saved before and after the first measurement, and loaded into handles with and without one."""
    folders = [tmp_path / "before", tmp_path / "after"]
    model = make_model()
    handle = repel(model, adam(model), verbose=False)
    dcp.save({"repulsive": handle}, checkpoint_id=folders[0], no_dist=True)
    backward(model)
    handle.optimizer.step()
    dcp.save({"repulsive": handle}, checkpoint_id=folders[1], no_dist=True)
    start = str(handle).splitlines()[2]
    dcp.load({"repulsive": handle}, checkpoint_id=folders[0], no_dist=True)
    assert handle.steps == 0 and str(handle).endswith("not measured yet")
    twin = make_model()
    fresh = repel(twin, adam(twin), verbose=False)
    dcp.load({"repulsive": fresh}, checkpoint_id=folders[1], no_dist=True)
    assert fresh.steps == 1 and str(fresh).splitlines()[2] == start


def test_the_state_of_one_head_is_json():
    model = nn.MultiheadAttention(8, 1)
    with pytest.warns(UserWarning, match="one head"):
        handle = repel(model, adam(model), SVGD(), groups=find_heads(model), verbose=False)
    model.in_proj_weight.grad = torch.ones_like(model.in_proj_weight)
    handle.optimizer.step()
    text = json.dumps(handle.state_dict(), allow_nan=False)  # a cosine of one head is NaN
    handle.load_state_dict(json.loads(text))
    assert str(handle).splitlines()[2].split()[-2:] == ["-", "-"]


def test_one_head_prints(capsys):
    model = nn.MultiheadAttention(8, 1)
    with pytest.warns(UserWarning, match="one head"):
        handle = repel(model, adam(model), SGLD(), verbose=False)
    model.in_proj_weight.grad = torch.ones_like(model.in_proj_weight)
    handle.optimizer.step()
    assert str(handle).split()[-2:] == ["-", "-"]  # one head has no cosine


def test_callable_kernels_are_measured_like_named_ones(make_model, backward):
    def rbf(x, y):
        return torch.exp(-(x - y).square().sum(-1) / 2.0)

    reports = []
    for kernel in ({"kernel": rbf}, {"bandwidth": 2.0}):
        model = make_model()
        rule = SVGD("heads", alpha="auto", ratio=0.3, smoothing=0, act_every=2, **kernel)
        handle = repel(model, adam(model), rule, measure_every=2, verbose=False)
        for index in range(3):
            backward(model, index)
            handle.optimizer.step()
        reports.append(handle.report())
        assert "not measured yet" not in str(handle)
    for one, other in zip(*reports, strict=True):
        for name in ("step", "drive", "repulsion", "ratio", "distance", "alpha", "similarity", "largest"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6), name
    assert reports[0][0].ratio == pytest.approx(0.3)
