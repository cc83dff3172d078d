"""The LSTM kernels against two nn.LSTM: on a GPU where there is one, else under Triton's interpreter."""

import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

from repulsive.errors import ConfigError  # noqa: E402
from repulsive.lab.layers import lstm  # noqa: E402
from repulsive.lab.systems.classification.model import SelfAttentiveConfig, SentenceClassifier  # noqa: E402

SIZES = [(3, 7, 5, 4), (17, 2, 20, 6), (2, 1, 40, 3), (2, 2, 70, 3)]  # sentences, words, units, size of a word
PATHS = {  # (weights held, 10 bits enough): how far from float32 results may be
    (True, True): 3e-4,
    (False, True): 3e-4,
    (False, False): 3e-6,
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")


def choose(monkeypatch, held, short):
    monkeypatch.setattr(lstm, "HELD", 160 if held else 0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", short)


class Case:
    """Two LSTMs, sentences of different lengths, and a gradient for every output, padding too."""

    def __init__(self, batch, length, units, size, device=DEVICE, dtype=torch.float32):
        torch.manual_seed(0)
        self.lstms = [nn.LSTM(size, units, batch_first=True).to(device, dtype) for _ in range(2)]
        self.words = torch.randn(batch, length, size).to(device, dtype).requires_grad_()
        self.ends = torch.randint(1, length + 1, (batch,)).to(device)
        self.ends[0] = length
        self.grad = torch.randn(batch, length, 2 * units).to(device, dtype)

    def run(self, function=lstm.two_way, scale=1.0):
        """Output, then gradients of words and of all weights."""
        out = function(self.words, self.ends, *self.lstms)
        leaves = [self.words, *(p for module in self.lstms for p in module.parameters())]
        return [out.detach(), *torch.autograd.grad(out, leaves, (self.grad * scale).to(out.dtype))]

    def exact(self):
        """The same in float64, by the modules."""
        case = Case.__new__(Case)
        case.lstms = []
        for module in self.lstms:
            copy = nn.LSTM(module.input_size, module.hidden_size, batch_first=True).to(self.words.device).double()
            copy.load_state_dict(module.state_dict())
            case.lstms.append(copy)
        case.words, case.ends = self.words.detach().double().requires_grad_(), self.ends
        case.grad = self.grad.double()
        return case.run(lstm._by_modules)


def errors(found, expected):
    return [float((a.double() - b).norm() / max(float(b.norm()), 1e-3)) for a, b in zip(found, expected, strict=True)]


def ran(function, case):
    """Whether the kernels did."""
    return "TwoWay" in type(function(case.words, case.ends, *case.lstms).grad_fn).__name__


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_two_modules(sizes, path, monkeypatch):
    choose(monkeypatch, *path)
    case = Case(*sizes)
    assert ran(lstm.two_way, case) and lstm._Shape.of(case.words, case.words.dtype, sizes[2]).held == path[0]
    assert max(errors(case.run(), case.exact())) < PATHS[path]


def test_a_short_product_is_short(monkeypatch):
    """If 10 bits were as exact as 23, the test above would not tell the paths apart."""
    case, found = Case(3, 7, 5, 4), []
    for path in PATHS:
        choose(monkeypatch, *path)
        found.append(max(errors(case.run(), case.exact())))
    assert min(found[:2]) > 10 * found[2]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_gradients_of_any_size_keep_their_digits(held, scale, monkeypatch):
    choose(monkeypatch, held, True)
    case = Case(2, 2, 70, 4)
    case.grad.view(2, 2, 2, 70)[..., 64:] = 0  # nothing to scale in one of the kernels' pieces
    plain, scaled = case.run(), case.run(scale=scale)
    assert max(errors([g / scale for g in scaled[1:]], [g.double() for g in plain[1:]])) < 1e-6


@pytest.mark.parametrize("held", [True, False])
def test_autocast_multiplies_in_sixteen_bits(held, monkeypatch):
    choose(monkeypatch, held, False)
    case, kind = Case(3, 5, 5, 4), torch.bfloat16 if GPU else torch.float16  # the interpreter knows no bfloat16
    with torch.autocast(DEVICE, kind):
        assert ran(lstm.two_way, case)
        found = case.run()
    assert found[0].dtype == kind and {g.dtype for g in found[1:]} == {torch.float32}
    assert 1e-4 < max(errors(found, case.exact())) < (2e-2 if GPU else 2e-3)


@pytest.mark.parametrize("path", PATHS)
def test_without_gradients_the_states_are_the_same(path, monkeypatch):
    choose(monkeypatch, *path)
    case = Case(3, 7, 40, 4)
    with torch.no_grad():
        alone = lstm.two_way(case.words, case.ends, *case.lstms)
    states = case.run()[0]
    assert (alone - states).abs().max() <= (PATHS[path] if GPU else 0)  # torch's GPU code differs in the last bits


@pytest.mark.parametrize("held", [True, False])
def test_a_sentence_does_not_depend_on_its_padding_or_its_neighbours(held, monkeypatch):
    choose(monkeypatch, held, True)
    case = Case(4, 6, 5, 3)
    together = lstm.two_way(case.words, case.ends, *case.lstms)
    for row, end in enumerate(case.ends.tolist()):
        alone = lstm.two_way(case.words[row : row + 1, :end], case.ends[row : row + 1], *case.lstms)
        assert torch.allclose(alone[0], together[row, :end], atol=1e-6)


def test_weights_that_need_no_gradient_get_none():
    case = Case(3, 2, 5, 4)
    for module in case.lstms:
        module.requires_grad_(False)
    out = lstm.two_way(case.words, case.ends, *case.lstms)
    out.backward(case.grad)
    assert case.words.grad is not None and case.lstms[0].weight_hh_l0.grad is None


def test_two_biases_do_not_share_their_gradient():
    case = Case(3, 2, 5, 4)
    lstm.two_way(case.words, case.ends, *case.lstms).backward(case.grad)
    first, second = case.lstms[1].bias_ih_l0.grad, case.lstms[1].bias_hh_l0.grad
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_a_second_derivative_is_refused():
    case = Case(2, 2, 5, 4)
    out = lstm.two_way(case.words, case.ends, *case.lstms)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), case.words, create_graph=True)


def test_what_the_kernels_do_not_take_goes_through_the_modules(monkeypatch):
    assert not ran(lstm.two_way, Case(3, 2, 5, 4, dtype=torch.float64))
    case = Case(3, 2, 5, 4)
    with monkeypatch.context() as patch:
        patch.setenv("REPULSIVE_KERNELS", "eager")
        assert not ran(lstm.two_way, case)
        assert all(map(torch.equal, case.run(), case.run(lstm._by_modules)))
    seen = []
    handle = case.lstms[1].register_forward_hook(lambda *_: seen.append(1))
    assert not ran(lstm.two_way, case) and seen == [1]
    handle.remove()
    assert ran(lstm.two_way, case)
    case.lstms[1] = nn.LSTM(4, 5, batch_first=True, bias=False).to(DEVICE)
    assert not ran(lstm.two_way, case)


def test_a_misspelt_choice_is_an_error(monkeypatch):
    case = Case(2, 2, 5, 4)
    monkeypatch.setenv("REPULSIVE_KERNELS", "tritno")
    with pytest.raises(ConfigError, match="tritno"):
        lstm.two_way(case.words, case.ends, *case.lstms)


def test_triton_is_not_loaded_before_it_is_used():
    code = (
        "import os, sys, torch; before = 'triton' in sys.modules\n"
        "from repulsive.lab.systems.classification.model import *\n"
        "for choice in ('', 'eager'):\n"
        "    os.environ['REPULSIVE_KERNELS'] = choice\n"
        "    SentenceClassifier(SelfAttentiveConfig.tiny(9))(torch.ones(2, 3, dtype=torch.long))\n"
        "    assert before or 'triton' not in sys.modules, choice"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_classifier_is_trained_alike(monkeypatch):
    choose(monkeypatch, True, False)
    tokens = torch.randint(1, 30, (5, 6), generator=torch.Generator().manual_seed(1))
    tokens[1, 4:], tokens[3, 1:] = 0, 0
    classes, after = torch.tensor([0, 1, 2, 3, 4], device=DEVICE), []
    for choice in ("eager", "triton"):
        monkeypatch.setenv("REPULSIVE_KERNELS", choice)
        torch.manual_seed(0)
        model = SentenceClassifier(SelfAttentiveConfig.tiny(30, dropout=0.0)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens.to(DEVICE)), classes).backward()
            optimizer.step()
        after.append(model.state_dict())
    assert list(after[0]) == list(after[1]) and "encoder.backwards.weight_hh_l0" in after[0]
    assert max(errors(after[1].values(), [v.double() for v in after[0].values()])) < 1e-5


def test_compiled_code_calls_the_kernels_too():
    case = Case(3, 2, 5, 4)
    compiled = torch.compile(lstm.two_way, backend="eager")
    assert ran(compiled, case)
    assert all(map(torch.equal, case.run(compiled), case.run()))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(64, 104, 150, 300), (33, 17, 150, 100), (64, 104, 300, 300), (20, 9, 512, 64)])
def test_published_sizes_are_as_exact_as_cudnn(sizes, mode, monkeypatch):
    choose(monkeypatch, True, mode == "tf32")
    case = Case(*sizes)
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "bfloat16"):
        found, theirs = case.run(), case.run(lstm._by_modules)
    expected = case.exact()
    least = 8e-3 if mode == "bfloat16" else 5e-6  # cuDNN keeps 10 bits under autocast, bfloat16 has 8
    assert max(errors(found, expected)) < max(3 * max(errors(theirs, expected)), least)


@pytest.mark.gpu
@pytest.mark.parametrize("units", [150, 300])
def test_a_captured_graph_gives_the_same(units):
    case = Case(20, 11, units, 30)
    expected = case.run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run()
    for _ in range(2):
        graph.replay()
    assert max(errors(found, [e.double() for e in expected])) < 1e-6
