"""The site of a version is built beside those of others, and listed with them."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "site" / "versions.py"


@pytest.fixture
def hook():
    spec = importlib.util.spec_from_file_location("versions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(hook, monkeypatch, folder, version):
    """Do what MkDocs does: change the configuration, write the site, and call the hook at the end."""
    monkeypatch.setenv("DOCS_VERSION", version)
    monkeypatch.setattr("repulsive.__version__", "0.1.0.dev0" if version in ("", "latest") else version)
    config = SimpleNamespace(site_name="repulsive", site_dir=str(folder), extra={})
    config = hook.on_config(config)
    Path(config.site_dir).mkdir(parents=True, exist_ok=True)
    (Path(config.site_dir) / "index.html").write_text(config.site_name)
    hook.on_post_build(config)
    return config


def test_versions_are_listed_from_the_newest(hook, monkeypatch, tmp_path):
    for version in ("0.9.0", "latest", "0.10.0", "0.2.1"):
        config = build(hook, monkeypatch, tmp_path, version)
        assert config.site_name == f"repulsive {version}" and config.extra["version"]["provider"] == "mike"
        assert (tmp_path / version / "index.html").read_text() == config.site_name
    (tmp_path / "assets").mkdir()
    build(hook, monkeypatch, tmp_path, "0.9.0")  # again: no second entry
    entries = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in entries] == ["0.10.0", "0.9.0", "0.2.1", "latest"]
    assert all(set(entry) == {"version", "title", "aliases"} for entry in entries)
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()


def test_a_start_page_that_exists_is_kept(hook, monkeypatch, tmp_path):
    config = build(hook, monkeypatch, tmp_path, "")
    assert (config.site_name, config.site_dir, config.extra) == ("repulsive", str(tmp_path), {})
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    build(hook, monkeypatch, tmp_path, "latest")
    assert (tmp_path / "index.html").read_text() == "repulsive"


@pytest.mark.parametrize("version", ["0.1.1", "0.1.0.dev0", "../0.1.0"])
def test_a_version_that_is_not_checked_out_is_refused(version, hook, monkeypatch, tmp_path):
    from mkdocs.exceptions import ConfigurationError

    monkeypatch.setenv("DOCS_VERSION", version)
    monkeypatch.setattr("repulsive.__version__", "0.1.0.dev0")
    with pytest.raises(ConfigurationError, match=r"got a checkout of 0\.1\.0\.dev0"):
        hook.on_config(SimpleNamespace(site_name="repulsive", site_dir=str(tmp_path), extra={}))
