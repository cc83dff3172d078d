"""Calls that no source file may contain, and attacks by untrusted files: pickles, paths, archives, XML, markup."""

import ast
import dataclasses
import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from repulsive.errors import CheckpointError, ConfigError, DataError
from repulsive.lab.engine.built_in import find, read_recipe
from repulsive.lab.engine.checkpoint import Checkpoints, load
from repulsive.lab.judge.make import make
from repulsive.lab.systems.classification import age
from repulsive.lab.systems.glue.model import load_encoder, make_encoder
from repulsive.lab.systems.graphs.agenda import read_json_graphs
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.text import documents, lines
from repulsive.lab.text.folders import MANIFEST, write_folder
from repulsive.lab.text.prepared import Prepared
from repulsive.pages import render_page
from repulsive.pages.sample_table import Sample, samples_html
from repulsive.pages.text import escaped, script_json
from tests.lab.text.test_prepared import small
from tests.pages.sample import sample_content

ROOT = Path(__file__).resolve().parents[2]
TREES = ("src", "studies", "examples")
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "compile": "runs text as code",
    "__import__": "imports a module by name",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "torch.save": "writes a pickle; use safetensors",
    "np.savez": "may write a pickle",
    "tempfile.mktemp": "another process may create the file first",
    "ssl._create_unverified_context": "trusts any server",
    "urllib.request.urlopen": "downloads without a checksum",
    "urllib.request.urlretrieve": "downloads without a checksum",
}
FORBIDDEN_IMPORTS = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "requests")
# Files that may import a module by a variable name: the name comes from the command line, or from a constant of the
# package. It never comes from a file.
IMPORTS_BY_NAME = {
    "src/repulsive/__init__.py",
    "src/repulsive/diagnostics/loading/import_path.py",
    "src/repulsive/lab/systems/datasets.py",
    "src/repulsive/loggers/open_loggers.py",
    "src/repulsive/loggers/quiet.py",
    "src/repulsive/lab/text/dataset.py",
    "studies/survey/package_models.py",
    "studies/survey/packages.py",
}


def modules():
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def faults_of_call(where: str, call: ast.Call) -> list[str]:
    """Forbidden uses in one call."""
    name, given = dotted(call.func), keywords(call)
    last = name.rpartition(".")[2]
    found = []
    if name in FORBIDDEN_CALLS:
        found.append(f"{name} {FORBIDDEN_CALLS[name]}")
    if constant(given.get("shell")) or ("shell" in given and not isinstance(given["shell"], ast.Constant)):
        found.append(f"{name}(shell=...) runs a shell")
    if name.startswith("subprocess.") and call.args and isinstance(call.args[0], ast.JoinedStr | ast.BinOp):
        found.append(f"{name} with a string that is put together; pass a list of arguments")
    if name == "torch.load" and constant(given.get("weights_only")) is not True:
        found.append("torch.load without weights_only=True runs code from the file")
    if name in ("np.load", "numpy.load", "np.save", "numpy.save") and constant(given.get("allow_pickle")) is not False:
        found.append(f"{name} without allow_pickle=False")
    if "trust_remote_code" in given and constant(given["trust_remote_code"]) is not False:
        found.append("trust_remote_code must be False")
    if last in ("extract", "extractall") and constant(given.get("filter")) != "data":
        found.append(f"{name} without filter='data' writes outside its folder")
    if last == "unpack_archive":
        found.append(f"{name} writes outside its folder")
    named = call.args and isinstance(call.args[0], ast.Constant)
    if last == "import_module" and not named and where not in IMPORTS_BY_NAME:
        found.append(f"{name} with a name that is not a constant")
    return [f"{where}:{call.lineno}: {fault}" for fault in found]


def faults_of_import(where: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    wrong = [name for name in names if name.partition(".")[0] in FORBIDDEN_IMPORTS]
    return [f"{where}:{node.lineno}: imports {name}" for name in wrong]


def faults(where: str, tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += faults_of_call(where, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += faults_of_import(where, node)
    return found


def test_no_source_file_has_a_forbidden_call():
    found = {where: faults(where, tree) for where, tree in modules()}
    assert len(found) > 200
    assert [fault for some in found.values() for fault in some] == []


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "exec(x)",
        "import pickle",
        "from yaml import load",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=y)",
        "subprocess.run(f'ls {x}')",
        "os.system('ls')",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "torch.save(x, y)",
        "np.load(x)",
        "np.load(x, allow_pickle=True)",
        "np.save(x, y)",
        "archive.extractall(x)",
        "archive.extract(x, filter='tar')",
        "shutil.unpack_archive(x)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "importlib.import_module(x)",
    ],
)
def test_the_check_finds_forbidden_calls(line):
    (fault,) = faults("some.py", ast.parse(f"\n{line}"))
    assert fault.startswith("some.py:2: ")


def test_scripts_of_pages_never_turn_text_into_markup():
    for path in (ROOT / "src").rglob("*.js"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert word not in line, f"{path.relative_to(ROOT)}:{number}: {word}"


# -- pickles ----------------------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickled_weights_run_no_code(tmp_path):
    make_encoder("tiny", 20).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for save in (lambda x, to: torch.save(x, to), lambda x, to: to.write_bytes(pickle.dumps(x))):
        save({"weight": Trap(tmp_path / "caught")}, tmp_path / "model" / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin: cannot be read"):
            load_encoder(tmp_path / "model")
        assert not (tmp_path / "caught").exists()


# -- names and links that leave a folder ------------------------------------------------------------------------------


def renamed(folder, old, new):
    """List a file under another name in the manifest, with its correct checksum."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][new] = manifest["files"].pop(old)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../outside.safetensors", "..", "sub/train.safetensors", "", "/etc/hostname"])
def test_a_manifest_lists_only_files_in_its_folder(tmp_path, name):
    small(tmp_path / "data").save()
    (tmp_path / "outside.safetensors").write_bytes((tmp_path / "data" / "train.safetensors").read_bytes())
    renamed(tmp_path / "data", "train.safetensors", name)
    with pytest.raises(DataError, match="which is not a file of its folder"):
        Prepared.load(tmp_path / "data")


def test_links_out_of_a_prepared_folder_are_refused(tmp_path):
    folder = small(tmp_path / "data").save().folder
    file = folder / "dev.safetensors"
    file.rename(folder / "kept")
    file.symlink_to("kept")
    assert Prepared.load(folder).parts  # a link within the folder is allowed
    file.unlink()
    (folder / "kept").rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="a link that leads out of its folder"):
        Prepared.load(folder)


def test_links_out_of_a_checkpoint_are_refused(tmp_path):
    path = Checkpoints(tmp_path / "run").save(3, {"model": {"x": torch.ones(2)}})
    assert load(path)[0] == 3
    (path / "state.json").rename(tmp_path / "state.json")
    (path / "state.json").symlink_to(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match="a link that leads out"):
        load(path)


def test_writing_to_a_linked_folder_replaces_its_target(tmp_path):
    write_folder(tmp_path / "real", {"a": b"1"}, {})
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", {"b": b"2"}, {})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "b").read_bytes() == b"2"
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}  # nothing is left behind


def test_the_name_of_an_author_cannot_be_a_path(tmp_path):
    document = "<author><document>secret</document></author>"
    (tmp_path / "outside.xml").write_text(document)
    (tmp_path / "pan").mkdir()
    (tmp_path / "pan" / "x.xml").write_text(document.replace("secret", "text"))
    (tmp_path / "pan" / "truth.txt").write_text("../outside:::F:::18-24\nx:::F:::18-24\n")
    with pytest.warns(UserWarning, match="is not the name of an author's file"):
        assert age.read_age(tmp_path / "pan").texts == ["text"]


def test_xml_entities_are_refused(tmp_path):
    (tmp_path / "secret").write_text("secret")
    bomb = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 20))
    kinds = {
        "x": f'<!DOCTYPE a [<!ENTITY e SYSTEM "file://{tmp_path}/secret">]><a><document>&e;</document></a>',
        "y": f'<!DOCTYPE a [<!ENTITY a0 "lol">{bomb}]><a><document>&a19;</document></a>',
        "z": "<a><document>text</document></a>",
    }
    for name, text in kinds.items():
        (tmp_path / f"{name}.xml").write_text(text)
    (tmp_path / "truth.txt").write_text("".join(f"{name}:::F:::18-24\n" for name in kinds))
    with pytest.warns(UserWarning, match="not XML"):
        assert age.read_age(tmp_path).texts == ["text"]


def test_a_recipe_by_name_is_one_of_the_package(tmp_path):
    file = find("yelp/svgd").method
    assert file.is_file()
    for name in ("../recipes/yelp/svgd", "../methods/svgd", str(file.with_suffix(""))):
        with pytest.raises(ConfigError, match="nor a built-in recipe"):
            read_recipe(name)


@pytest.mark.parametrize(
    "change", ["method.rule=os:system", "method.kernel=builtins.eval", "task=os.system", "optimizer.name=torch.SGD"]
)
def test_a_recipe_cannot_name_a_python_object(change):
    with pytest.raises(ConfigError, match="must be one of"):
        open_recipe("yelp/svgd", [change])


# -- archives ---------------------------------------------------------------------------------------------------------


def test_archives_are_read_and_never_unpacked(tmp_path, monkeypatch):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, kind in (
            ("../escaped.txt", tarfile.REGTYPE),
            ("/tmp/absolute.txt", tarfile.REGTYPE),
            ("link.txt", tarfile.SYMTYPE),
            ("pipe.txt", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, 4 if kind == tarfile.REGTYPE else 0, "/etc/passwd"
            archive.addfile(info, io.BytesIO(b"text"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar.gz").write_bytes(written.getvalue())
    monkeypatch.chdir(tmp_path / "in")
    assert list(documents.read_documents(Path("a.tar.gz"))) == [["text"], ["text"]]
    with pytest.raises(DataError, match="has no file"):
        read_json_graphs("a.tar.gz", member="passwd")
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "a.tar.gz"]


def test_a_line_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_LONGEST", 1 << 16)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"fine\n" + b"0" * (1 << 22)))
    with pytest.raises(DataError, match="line 2: longer than 65,536 bytes"):
        list(lines.read_lines(tmp_path / "bomb.gz"))


# -- markup -----------------------------------------------------------------------------------------------------------

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload='alert(1)' <!--\u202e&lt;"
CHOICES = ("better", "mark", "over")  # fields that are one of a few words
ALLOWED = {  # elements of our pages; any other element comes from data
    "html",
    "head",
    "meta",
    "title",
    "style",
    "script",
    "body",
    "main",
    "header",
    "section",
    "article",
    "nav",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "p",
    "dl",
    "dt",
    "dd",
    "ul",
    "ol",
    "li",
    "b",
    "small",
    "span",
    "div",
    "label",
    "input",
    "button",
    "select",
    "option",
    "progress",
    "details",
    "summary",
    "fieldset",
    "legend",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "caption",
    "svg",
    "g",
    "path",
    "line",
    "polyline",
    "circle",
    "rect",
    "text",
    "noscript",
    "mark",
    "template",
    "output",
    "colgroup",
    "col",
    "use",
    "defs",
    "pattern",
    "figure",
    "figcaption",
    "polygon",
    "tspan",
    "i",
}


class MarkupFinder(HTMLParser):
    """Collects elements and attributes of a page that can only come from data."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts = [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.found += [tag] if tag not in ALLOWED else []
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on") or name in ("src", "srcdoc")]


def find_markup(page: str) -> MarkupFinder:
    found = MarkupFinder()
    found.feed(page)
    return found


def test_escaped_text_cannot_add_markup():
    assert find_markup(f'<p title="{escaped(NASTY)}">{escaped(NASTY)}</p>').found == []
    written = script_json({NASTY: [NASTY]})
    assert not set("<>&") & set(written) and json.loads(written) == {NASTY: [NASTY]}


def test_a_page_for_judges_shows_markup_as_text(tmp_path):
    for name in ("wavelet", "gearbox"):
        item = {"id": NASTY, "text": f"{name} {NASTY}", "input": {NASTY: [NASTY, [NASTY]]}, "gold": NASTY}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    made = make(tmp_path / "wavelet.jsonl", tmp_path / "gearbox.jsonl", tmp_path / "page.html", title=NASTY)
    page = find_markup(made.page.read_text(encoding="utf-8"))
    assert (page.found, page.scripts) == ([], 1)


def nasty(value):
    """Add markup to every string in the content."""
    if isinstance(value, str):
        return value + NASTY
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in CHOICES]
        return dataclasses.replace(value, **{name: nasty(getattr(value, name)) for name in names})
    if isinstance(value, dict):
        return {nasty(key): nasty(item) for key, item in value.items()}
    return type(value)(map(nasty, value)) if isinstance(value, list | tuple) else value


def test_a_report_shows_markup_as_text():
    plain = sample_content(count=2, heads=3)
    expected = find_markup(render_page(plain))
    page = find_markup(render_page(nasty(plain)))
    assert expected.found == [] and page.found == []
    assert page.scripts == expected.scripts > 0


def test_a_table_of_samples_shows_markup_as_text():
    one = Sample(NASTY, [NASTY], {NASTY: [NASTY, 0], "b": [0, NASTY]})
    assert find_markup(samples_html([one])).found == []


def test_downloads_have_a_checksum():
    from repulsive.lab.systems.classification import movie_reviews

    assert len(bytes.fromhex(movie_reviews.SHA256)) == hashlib.sha256().digest_size
