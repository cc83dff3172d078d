"""Find and prove the heads of small models of other packages, and check the proofs by perturbation.

    python -m studies.survey.packages --out results/survey

Packages that are installed are surveyed; timm has one model per file that has attention, at its own size. Each model
runs in a forked process of its own, as in `survey.py`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import warnings
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from studies.survey import package_models
from studies.survey.diffusion_models import diffusers
from studies.survey.package_models import PACKAGES, Cases
from studies.survey.perturb import contradictions
from studies.survey.run import examine, last, limited, outcome, timm_models

from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.infer import complete

MEANING = {
    "proved": "every group is proved by the trace",
    "in part": "some groups are proved; the others are refused: the example does not reach them, or heads are mixed",
    "refused": "nothing is proved: the reason is given, and `repel` refuses to train",
    "no heads": "no multi-head attention",
    "not run": "does not build or run at a small size",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/survey"))
    parser.add_argument(
        "--packages", nargs="*", choices=list(PACKAGES), default=list(PACKAGES), help="the others are kept"
    )
    parser.add_argument("--only", nargs="*", help="parts of the names of models; nothing is written")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--gigabytes", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = options.out / "packages.json"
    known = json.loads(kept.read_text()) if kept.exists() else []
    results = {r["architecture"]: r for r in known if r["package"] not in options.packages}
    for package, module in PACKAGES.items():
        if package not in options.packages or importlib.util.find_spec(module) is None:
            continue
        importlib.import_module(module)  # once, before any fork
        for name, case in cases_of(package).items():
            if options.only and not any(word in name for word in options.only):
                continue
            result = limited(name, options.seconds, options.gigabytes, lambda name, case=case: prove(name, case))
            results[name] = result | {"package": package, "verdict": verdict(result)}
            print(f"{name:44} {results[name]['verdict']:9} {result['note'][:110]}", flush=True)
        if not options.only:
            order = sorted(results.values(), key=lambda result: list(PACKAGES).index(result["package"]))
            write(options.out, order)  # after each package: timm takes longest


def cases_of(package: str) -> Cases:
    if package == "timm":
        return {name: lambda name=name: timm_case(name) for name in timm_with_attention()}  # type: ignore[misc]
    if package == "diffusers":
        return diffusers()
    cases: Cases = getattr(package_models, PACKAGES[package])()
    return cases


def timm_with_attention() -> list[str]:
    """One model per file of timm, without those that a survey has found to have no attention."""
    kept = Path(__file__).parents[2] / "results" / "survey" / "timm.json"
    known = json.loads(kept.read_text())["results"] if kept.exists() else []
    without = {result["architecture"] for result in known if result["status"] == "none"}
    return [name for name in timm_models() if name not in without]


def timm_case(name: str) -> Any:
    import timm  # type: ignore[import-not-found]

    model = timm.create_model(name.removeprefix("timm-"), pretrained=False)
    return model, (torch.randn(1, *model.default_cfg["input_size"]),)


def prove(name: str, case: Any) -> dict[str, Any]:
    """Build, run, find, prove, and check by perturbation."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, inputs = case()
    model.eval()
    try:
        with torch.no_grad():
            model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    except Exception as error:
        return outcome(name, "does not run", last(error))
    try:
        result = examine(name, model, inputs)
        completed = complete(model, inputs, heads_from_table(model)[0])
        held = {r.name for r in completed.reports if "held constant" in r.note}
        proved = [g for g in completed.groups if g.proof == "proved" and g.name not in held]
        result["checked"], result["contradicted"] = contradictions(model, inputs, proved)
        guessed = {(g.name, _rows(g)) for g in heads_from_table(model)[0] if g.proof == "guess"}
        found = {(g.name, _rows(g)) for g in completed.groups if g.proof == "proved"}
        names = {name for name, _ in found}
        result["wrong_guesses"] = sorted(name for name, rows in guessed - found if name in names)
        result["groups"], result["verified"] = len(completed.groups), sum(g.proof == "proved" for g in completed.groups)
        result["mixed"] = len(completed.mixed)
    except Exception as error:
        return outcome(name, "failed", last(error))
    return result


def _rows(group: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((s.parameter_name, tuple(s.rows.flatten().tolist())) for s in group.slices)


def verdict(result: dict[str, Any]) -> str:
    if result.get("contradicted"):
        return "wrong"
    if result["status"] in ("does not build", "does not run", "stopped"):
        return "not run"
    if result["status"] == "none":
        return "no heads"
    proved = result.get("verified", 0)
    return "refused" if not proved else "proved" if proved == result["groups"] and not result["mixed"] else "in part"


def write(out: Path, results: list[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "packages.json").write_text(json.dumps(results, indent=1) + "\n")
    packages = list(dict.fromkeys(r["package"] for r in results))
    columns = [*MEANING, "wrong"]
    lines = [
        "# Survey of other packages: proved, refused or wrong",
        "",
        f"{len(results)} models, torch {torch.__version__}, {date.today()}. Made by "
        "`python -m studies.survey.packages --out results/survey`.",
        "",
        "Each model is given to `find_heads` with an example. *Wrong* would be a proved group that a check without "
        "autograd contradicts: the rows of one head are changed, and the places of the next attention call that change "
        "are compared with those of another head. At most nine groups of a model are checked; heads under a norm over "
        "the full width, and values of attention that is written out, cannot be. A *wrong guess* is a group whose rows "
        "a signature (names and shapes) got wrong and the trace got right.",
        "",
        f"| package | version | models | {' | '.join(columns)} | groups proved | checked | wrong guesses |",
        "| --- " * (len(columns) + 6) + "|",
    ]
    for package in packages:
        own = [r for r in results if r["package"] == package]
        counts = Counter(r["verdict"] for r in own)
        sums = [sum(r.get(x, 0) for r in own) for x in ("verified", "checked")]
        cells = [package, version(package), len(own), *(counts[c] for c in columns), *sums]
        lines.append(f"| {' | '.join(map(str, cells))} | {sum(len(r.get('wrong_guesses', ())) for r in own)} |")
    lines += ["", *(f"- *{word}*: {meaning}." for word, meaning in MEANING.items()), ""]
    lines += ["| model | verdict | groups | proved | wrong guesses | note |", "| --- " * 6 + "|"]
    for r in results:
        note = str(r["note"]).replace("|", "/").replace("\n", " ")[:200]
        guesses = len(r.get("wrong_guesses", ()))
        cells = [r["architecture"], r["verdict"], r.get("groups", ""), r.get("verified", ""), guesses]
        lines.append(f"| {' | '.join(map(str, cells))} | {note} |")
    (out / "packages.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
