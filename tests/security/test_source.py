"""Calls and imports that no source file may contain, and downloads without a checksum."""

import ast
import hashlib
from pathlib import Path

import pytest

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


def test_downloads_have_a_checksum():
    from repulsive.lab.systems.classification import movie_reviews

    assert len(bytes.fromhex(movie_reviews.SHA256)) == hashlib.sha256().digest_size
