"""The playground of the start page: its rules are those of the library, and it works by keyboard, calm and dark."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from repulsive import SVGD
from repulsive.particles.kernel_free import KernelFree
from tests.docs.test_pictures import PICTURES
from tests.pages.browser import driven_browser, driven_page, needs_driver, violations

DOCS = Path(__file__).resolve().parents[2] / "docs"
FRAME = 16  # milliseconds; a frame takes two steps
SETTINGS = [
    {"stepsize": stepsize, "alpha": alpha, "smoothing": smoothing, "space": space}
    for stepsize, alpha in ((1.0, 1.0), (0.1, 8.0), (0.1, 0.0))
    for smoothing in (1, 0)
    for space in ("weights", "sphere")
]


def groups() -> list[torch.Tensor]:
    """Particles [M, 2]: spread, nearly equal, one at the origin, an even and an odd number of distances."""
    make = torch.Generator().manual_seed(0)
    draw = [torch.randn(size, 2, generator=make, dtype=torch.float64) for size in (2, 4, 5, 10)]
    near = 1 + 1e-5 * torch.randn(4, 2, generator=make, dtype=torch.float64)
    with_zero = torch.cat([draw[1], torch.zeros(1, 2, dtype=torch.float64)])
    return [*draw, near, with_zero]


def cases() -> list[dict]:
    make = torch.Generator().manual_seed(1)
    listed = []
    for theta in groups():
        grad = torch.randn(theta.shape, generator=make, dtype=torch.float64)
        listed += [{"theta": theta.tolist(), "grad": grad.tolist(), "settings": settings} for settings in SETTINGS]
    return listed


CALL = """
const answers = cases.map(({ theta, grad, settings }) => ({
  mixture: rules.mixtureGradient(theta),
  svgd: rules.svgd(theta, grad, settings),
  free: rules.kernelFree(theta, grad, settings),
}));
"""


def check(answers: list[dict]) -> None:
    for case, answer in zip(cases(), answers, strict=True):
        theta, grad = (torch.tensor(case[name], dtype=torch.float64) for name in ("theta", "grad"))
        settings = case["settings"]
        free = {name: settings[name] for name in ("stepsize", "alpha", "smoothing")}
        for name, expected in (
            ("svgd", SVGD(**settings).gradient(theta, grad)),
            ("free", KernelFree(**free).gradient(theta, grad)),
        ):
            own = torch.tensor(answer[name], dtype=torch.float64)
            scale = expected.abs().max().clamp(min=1)
            assert float((own - expected).abs().max() / scale) < 1e-6, (name, settings, theta)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_rules_are_those_of_the_library():
    code = f"const rules = require({json.dumps(str(DOCS / 'site' / 'rules.js'))});\n"
    code += f"const cases = {json.dumps(cases())};\n{CALL}process.stdout.write(JSON.stringify(answers));"
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    check(answers)
    theta = groups()[3].requires_grad_()
    modes = torch.tensor([[-2.2, -1.2], [2.1, -0.6], [0.1, 2.0]], dtype=torch.float64)
    energy = -torch.logsumexp(-(theta[:, None] - modes).square().sum(-1) / (2 * 0.75**2), dim=1).sum()
    (slope,) = torch.autograd.grad(energy, theta)
    own = torch.tensor(answers[3 * len(SETTINGS)]["mixture"], dtype=torch.float64)
    assert torch.allclose(own, slope, atol=1e-9)


def test_the_landscape_is_that_of_the_pictures():
    script, rules = (PICTURES / "particles.py").read_text(), (DOCS / "site" / "rules.js").read_text()
    assert "[[-2.2, -1.2], [2.1, -0.6], [0.1, 2.0]]" in script and "[[-2.2, -1.2], [2.1, -0.6], [0.1, 2.0]]" in rules
    assert "WIDTH = 0.75" in script and "WIDTH = 0.75" in rules


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The start page's own markup, style and scripts, without the theme."""
    folder = tmp_path_factory.mktemp("playground")
    markup = (DOCS / "index.md").read_text(encoding="utf-8")
    body = re.search(r'<div id="playground".*?</div>\n(?:<script.*?</script>\n)+', markup, re.S)[0]
    shutil.copytree(DOCS / "site", folder / "site")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Playground</title>'
    head += '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="site/site.css">'
    path = folder / "index.html"
    path.write_text(f"{head}<body data-md-color-scheme='default'><main><h1>Playground</h1>{body}</main></body></html>")
    return path


@pytest.fixture(scope="module")
def browser():
    with driven_browser() as opened:
        yield opened


def result(page) -> tuple[int, float, float, int]:
    """The step, mean distance, mean cosine and number of modes that the page shows."""
    text = page.inner_text("output[name=result]")
    found = re.fullmatch(r"step (\d+): mean distance ([\d.]+), mean cosine (-?[\d.]+), modes found (\d) of 3", text)
    return int(found[1]), float(found[2]), float(found[3]), int(found[4])


@needs_driver
def test_the_rules_in_a_browser(browser, page_file):
    with driven_page(browser, page_file) as (page, _):
        check(page.evaluate("(cases) => { const rules = repulsiveRules;" + CALL + "return answers; }", cases()))


@needs_driver
def test_it_moves_and_works_by_keyboard(browser, page_file):
    with driven_page(browser, page_file) as (page, said):
        page.clock.install(time=0)
        page.clock.pause_at(1000)  # frames are drawn by `run_for` alone
        page.reload()
        page.clock.run_for(11 * FRAME)
        assert result(page)[0] == 22
        page.focus("input[name=alpha]")
        page.keyboard.press("End")
        page.clock.run_for(FRAME)
        assert page.inner_text("output[name=weight]") == "8.0" and result(page)[0] == 24
        page.focus("button[name=play]")
        page.keyboard.press("Enter")
        assert page.inner_text("button[name=play]") == "Play"
        page.clock.run_for(10 * FRAME)
        assert result(page)[0] == 24  # paused
        page.keyboard.press("Space")
        page.clock.run_for(FRAME)
        assert result(page)[0] == 26
        page.focus("input[name=rule][value=svgd]")
        page.keyboard.press("ArrowRight")
        assert page.is_checked("input[value=kernel-free]") and page.is_disabled("input[value=sphere]")
        page.keyboard.press("ArrowRight")  # round to the first
        assert page.is_checked("input[value=plain]") and page.is_disabled("input[name=alpha]")
        assert [word for word in said if not word.startswith("file:")] == []


@needs_driver
def test_reduced_motion_shows_the_end_and_what_the_rules_do(browser, page_file):
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(page_file.as_uri())
    step, distance, _, modes = result(page)
    page.wait_for_timeout(150)
    assert result(page)[0] == step == 400 and page.inner_text("button[name=play]") != "Pause"
    page.check("input[value=plain]")
    assert result(page)[1] < 0.01 < distance and result(page)[3] == 1
    page.check("input[value=svgd]")
    assert result(page) == (step, distance, result(page)[2], modes) and modes == 3
    page.check("input[value=sphere]")
    assert result(page)[0] == 400
    context.close()


@needs_driver
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_used_by_all(browser, page_file, dark):
    assert violations(browser, page_file, dark=dark) == []
