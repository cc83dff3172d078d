"""REPULSIVE_KERNELS: which devices use Triton kernels, and the errors for values that cannot be followed."""

import pytest

from repulsive import triton_setting
from repulsive.errors import ConfigError
from repulsive.triton_setting import is_triton_requested, use_triton


@pytest.fixture
def installed(monkeypatch):
    """Set the installed version of Triton; None for no Triton."""

    def install(version):
        monkeypatch.setattr(triton_setting, "_triton_version", lambda: version)

    monkeypatch.delenv("REPULSIVE_KERNELS", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    install((3, 6))
    return install


@pytest.mark.parametrize(
    ("version", "device", "expected"),
    [((3, 6), "cuda", True), ((3, 5), "cuda", False), (None, "cuda", False), ((3, 6), "cpu", False)],
)
def test_by_default_cuda_devices_use_triton(installed, version, device, expected):
    installed(version)
    assert use_triton(device, oldest=(3, 6)) is expected
    assert not is_triton_requested()


def test_any_version_will_do_unless_one_is_named(installed):
    installed((0, 0))
    assert use_triton("cuda")


def test_eager_turns_triton_off(installed, monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "eager")
    assert not use_triton("cuda")


def test_triton_on_the_cpu_needs_the_interpreter(installed, monkeypatch):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    assert is_triton_requested()
    with pytest.raises(ConfigError, match=r"CUDA device, not on cpu.*TRITON_INTERPRET=1"):
        use_triton("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_triton("cpu")


@pytest.mark.parametrize(
    ("version", "message"), [(None, "package triton, version 3.6 or newer, is not"), ((3, 5), "3.6 or newer")]
)
def test_triton_that_is_missing_or_too_old(installed, monkeypatch, version, message):
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    installed(version)
    with pytest.raises(ConfigError, match=message):
        use_triton("cuda", oldest=(3, 6))


@pytest.mark.parametrize("ask", [is_triton_requested, lambda: use_triton("cpu")])
def test_a_misspelt_value_is_an_error(installed, monkeypatch, ask):
    monkeypatch.setenv("REPULSIVE_KERNELS", "tritno")
    with pytest.raises(ConfigError, match="'tritno': choose eager or triton"):
        ask()
