"""Survey of other packages: find and prove the heads of small models, and check the proofs by perturbation.

    python -m studies.survey.packages --out results/survey

Surveys the installed ones of diffusers, vit-pytorch, x-transformers, open_clip, litgpt, torchtune,
sentence-transformers and timm; of timm one model per file that has attention, at its published size. Each model runs in
a forked process, as in `studies.survey.run`. Writes a table and JSON to `--out`. `--update NAME` (or a verdict) repeats
some of its models.
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
from studies.survey.examine import error_text, examine, outcome
from studies.survey.limits import limited
from studies.survey.package_models import PACKAGES, Cases
from studies.survey.perturb import contradictions
from studies.survey.run import timm_models
from studies.survey.sentence_models import sentence_transformers

from repulsive.diagnostics.hooks.calling import call
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.infer import complete
from repulsive.heads.trace.mixing import CHANNELS
from repulsive.safety.markdown import format_table

MEANING = {
    "proved": "every group is proved by the trace",
    "in part": "some groups are proved; the others are refused: the example does not reach them, or heads are mixed",
    "refused": "no group is proved: the note has the reason, and `repel` refuses to train",
    "no heads": "no multi-head dot-product attention over tokens; the note has the reason",
    "not run": "does not build or run at a small size, or exceeds the time limit",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/survey"), help="folder of the table")
    parser.add_argument(
        "--packages", nargs="*", choices=list(PACKAGES), default=list(PACKAGES), help="results of others are kept"
    )
    parser.add_argument("--only", nargs="*", help="parts of the names of models; writes nothing")
    parser.add_argument("--update", nargs="+", default=[], help="repeat these models or verdicts; keep other results")
    parser.add_argument("--seconds", type=int, default=60, help="time limit of a model")
    parser.add_argument("--gigabytes", type=int, default=8, help="memory limit of a model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = options.out / "packages.json"
    known = json.loads(kept.read_text()) if kept.exists() else []
    results = {
        r["architecture"]: r
        for r in known
        if r["package"] not in options.packages
        or (options.update and r["architecture"] not in options.update and r["verdict"] not in options.update)
    }
    for package, module in PACKAGES.items():
        if package not in options.packages or importlib.util.find_spec(module) is None:
            continue
        importlib.import_module(module)  # once, before any fork
        for name, case in cases_of(package).items():
            if name in results or (options.only and not any(word in name for word in options.only)):
                continue
            result = limited(name, options.seconds, options.gigabytes, lambda name, case=case: prove(name, case))
            results[name] = result | {"package": package, "version": version(package), "verdict": verdict(result)}
            print(f"{name:44} {results[name]['verdict']:9} {result['note'][:110]}", flush=True)
        if not options.only:
            listed = {result["architecture"]: place for place, result in enumerate(known)}
            order = sorted(
                results.values(),
                key=lambda r: (list(PACKAGES).index(r["package"]), listed.get(r["architecture"], len(known))),
            )
            write(options.out, order)  # after each package, because timm takes long


def cases_of(package: str) -> Cases:
    if package == "timm":
        models: Cases = {name: lambda name=name: timm_case(name) for name in timm_with_attention()}  # type: ignore[misc]
        return models | package_models.timm_classes()
    if package == "diffusers":
        return diffusers()
    if package == "sentence-transformers":
        return sentence_transformers()
    cases: Cases = getattr(package_models, PACKAGES[package])()
    return cases


def timm_with_attention() -> list[str]:
    """One model per file of timm, without those that have no attention according to results/survey/timm.json."""
    kept = Path(__file__).parents[2] / "results" / "survey" / "timm.json"
    known = json.loads(kept.read_text())["results"] if kept.exists() else []
    without = {result["architecture"] for result in known if result["status"] == "none"}
    return [name for name in timm_models() if name not in without]


def timm_case(name: str) -> Any:
    import timm  # type: ignore[import-not-found]

    model = timm.create_model(name.removeprefix("timm-"), pretrained=False)
    return model, (torch.randn(1, *model.default_cfg["input_size"]),)


def prove(name: str, case: Any) -> dict[str, Any]:
    """Build and run a model, find and prove its heads, and check the proofs by perturbation."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, inputs = case()
    model.eval()
    try:
        with torch.no_grad():
            call(model, inputs)
    except Exception as error:
        return outcome(name, "does not run", error_text(error))
    try:
        completed = complete(model, inputs, heads_from_table(model)[0])
        result = examine(name, model, inputs, completed)
        if result["status"] == "none" and not result["note"]:
            result["note"] = "no module looks like attention"
        held = {r.name for r in completed.reports if "held constant" in r.note}
        proved = [g for g in completed.groups if g.proof == "proved" and g.name not in held]
        result["checked"], result["contradicted"] = contradictions(model, inputs, proved)
        guessed = {(g.name, _rows(g)) for g in heads_from_table(model)[0] if g.proof == "guess"}
        found = {(g.name, _rows(g)) for g in completed.groups if g.proof == "proved"}
        names = {name for name, _ in found}
        result["wrong_guesses"] = sorted(name for name, rows in guessed - found if name in names)
        result["groups"], result["verified"] = len(completed.groups), sum(g.proof == "proved" for g in completed.groups)
        result["mixed"] = sum(report.note != CHANNELS for report in completed.mixed)
        if completed.mixed:
            reasons = dict.fromkeys(f"{report.part} left out: {report.note}" for report in completed.mixed)
            result["note"] = "; ".join(filter(None, [result["note"], *reasons]))[:300]
    except Exception as error:
        return outcome(name, "failed", error_text(error))
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
        "Each model is passed to `find_heads` with an example. *Wrong* would be a proved group that a check without "
        "autograd contradicts: the check changes the rows of one head and compares the positions that change in the "
        "next attention call with those of another head. At most nine groups of a model are checked; heads under a "
        "norm over the full width, and values of attention that is written out, cannot be. A *wrong guess* is a group "
        "whose rows a signature (names and shapes) got wrong and the trace got right. The share proved is that of "
        "models that run and have heads.",
        "",
    ]
    rows = []
    for package in packages:
        own = [r for r in results if r["package"] == package]
        counts = Counter(r["verdict"] for r in own)
        sums = [sum(r.get(x, 0) for r in own) for x in ("verified", "checked")]
        ran = len(own) - counts["not run"] - counts["no heads"]
        share = f"{counts['proved']} of {ran} ({100 * counts['proved'] / max(ran, 1):.0f} %)"
        cells = [
            package,
            next((r["version"] for r in own if r.get("version")), None) or version(package),
            len(own),
            *(counts[c] for c in columns),
            share,
            *sums,
        ]
        guesses = sum(len(r.get("wrong_guesses", ())) for r in own)
        rows.append([*map(str, cells), str(guesses)])
    head = ["package", "version", "models", *columns, "share proved", "groups proved", "checked", "wrong guesses"]
    lines += [format_table(head, rows), "", *(f"- *{word}*: {meaning}." for word, meaning in MEANING.items()), ""]
    rows = []
    for r in results:
        note = str(r["note"]).replace("|", "/").replace("\n", " ")[:200]
        guesses = len(r.get("wrong_guesses", ()))
        cells = [r["architecture"], r["verdict"], r.get("groups", ""), r.get("verified", ""), guesses]
        rows.append([*map(str, cells), note])
    lines.append(format_table(["model", "verdict", "groups", "proved", "wrong guesses", "note"], rows))
    (out / "packages.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
