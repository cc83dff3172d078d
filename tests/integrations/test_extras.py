"""Optional packages are not loaded on import, and the error for a missing one names its extra."""

import importlib
import subprocess
import sys

import pytest

EXTRAS = {
    "transformers": ["transformers"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "lightning.pytorch", "pytorch_lightning"],
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(extra, monkeypatch):
    for package in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, package, None)  # makes `import` fail as for a missing package
    monkeypatch.delitem(sys.modules, f"repulsive.integrations.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {extra}: python -m pip install -e '\.\[{extra}\]'"):
        importlib.import_module(f"repulsive.integrations.{extra}")


def test_importing_the_integrations_loads_no_optional_package():
    code = "import sys, repulsive.integrations; print(*{name.split('.')[0] for name in sys.modules})"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(printed.split())
    assert "repulsive" in loaded
    assert loaded & {name for names in EXTRAS.values() for name in names} == set()
