"""Find and prove the heads of every architecture that the installed transformers, or timm, can build.

    python -m studies.survey.run --out results/survey
    python -m studies.survey.run --out results/survey --library timm --jobs 8

Each architecture is built tiny and random from its own default configuration, run once on dummy inputs, and given to
`find_heads` with that example. One forked process each, with a time and a memory limit; finished ones are kept in
CACHE and not run again by the same code (`--again NAME` runs some anew, `--stale` keeps those of other code too).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from studies.survey.by_hand import BY_HAND
from studies.survey.dummies import example_inputs, with_places
from studies.survey.shrink import tiny_configs, too_large

import repulsive.heads
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import clean, module_of
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.infer import Completed, complete

STATUSES = {
    "table": "every group known to the table and verified by the trace",
    "inferred": "verified, at least one group inferred by the trace",
    "partly": "verified where the example ran; the rest (a tower that got no input) is known to the table alone",
    "none": "no multi-head attention in the shrunk model",
    "missed": "attention that was neither known nor inferred",
    "refused": "the table is wrong on some part, the trace says so and cannot replace it",
    "failed": "find_heads itself failed",
    "does not build": "the shrunk configuration is refused",
    "does not run": "no dummy input fits",
    "stopped": "over the time or memory limit",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/survey"))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "repulsive-survey")
    parser.add_argument("--library", choices=["transformers", "timm"], default="transformers")
    parser.add_argument("--jobs", type=int, default=1, help="architectures side by side")
    parser.add_argument("--only", nargs="*", help="architectures (model types) to survey")
    parser.add_argument("--again", nargs="*", default=[], help="architectures or statuses to run anew")
    parser.add_argument("--stale", action="store_true", help="keep results that another version of the code made")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--gigabytes", type=int, default=8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    names = options.only or (timm_models() if options.library == "timm" else architectures())
    if not names:
        raise SystemExit("survey: timm is not installed")
    if options.jobs > 1:
        side_by_side(names, options)
    results = []
    for name in names:
        kept = options.cache / f"{name}.json"
        result = json.loads(kept.read_text()) if kept.exists() else None
        if result is not None and not options.stale and result.get("code") != code_version():
            result = None
        if result is None or name in options.again or result["status"] in options.again:
            result = limited(name, options.seconds, options.gigabytes)
            kept.write_text(json.dumps(result, indent=1))
            print(f"{name:32} {result['status']:15} {result['note'][:100]}", flush=True)
        results.append(result)
    if not options.only:
        write(options.out, options.library, results)


def side_by_side(names: list[str], options: argparse.Namespace) -> None:
    """Fill the cache with several processes; what they left undone the caller does."""
    shared = ["--cache", str(options.cache), "--seconds", str(options.seconds), "--gigabytes", str(options.gigabytes)]
    again = ["--again", *options.again] if options.again else []
    again += ["--stale"] if options.stale else []
    parts = [names[start :: options.jobs] for start in range(options.jobs)]
    workers = [
        subprocess.Popen([sys.executable, "-m", "studies.survey.run", *shared, *again, "--only", *p])
        for p in parts
        if p
    ]
    for worker in workers:
        worker.wait()
    options.again = []


def architectures() -> list[str]:
    from transformers import AutoModel, BertModel, CLIPModel, LlamaModel  # noqa: F401
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def timm_models() -> list[str]:
    """One model per file of timm, as small as its name tells; none where timm is not installed."""
    try:
        import timm  # type: ignore[import-not-found]
    except ImportError:
        return []
    sizes = ("atto", "femto", "pico", "nano", "xxs", "_xs", "tiny", "_0", "_b0", "_s", "small", "_9", "_12", "mini")

    def weight(name: str) -> tuple[int, int, str]:
        rank = next((place for place, word in enumerate(sizes) if word in name), len(sizes))
        pixels = max([int(number) for number in re.findall(r"\d{3}", name)] or [224])
        return rank, pixels, name

    return [f"timm-{min(timm.list_models(module=module), key=weight)}" for module in timm.list_modules()]


def limited(
    name: str, seconds: int, gigabytes: int, work: Callable[[str], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Survey one architecture in a forked process, so that nothing it does outlives it."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        signal.alarm(seconds)
        try:
            result = (work or survey)(name)
        except BaseException as error:  # whatever it is, it is this architecture's result
            result = outcome(name, "stopped" if isinstance(error, MemoryError) else "does not build", last(error))
        os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else outcome(name, "stopped", f"no answer within {seconds} s, {gigabytes} GB")


def survey(name: str) -> dict[str, Any]:
    """Build, run, find, prove."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    warnings.simplefilter("ignore")
    if name.startswith("timm-"):
        import timm

        model = timm.create_model(name.removeprefix("timm-"), pretrained=False).eval()
        return examine(name, model, {"x": torch.randn(1, *model.default_cfg["input_size"])})
    best = outcome(name, "does not build", "")
    for config, given in _variants(CONFIG_MAPPING[name], name):
        try:
            if too_large(config):
                best["note"] = best["note"] or "too large even when shrunk"
                continue
            torch.manual_seed(0)
            model = AutoModel.from_config(config).eval()
        except Exception as error:
            best["note"] = best["note"] or last(error)
            continue
        tries = iter([given]) if given else example_inputs(model, config)
        while (inputs := next(tries, None)) is not None:
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:
                if best["status"] == "does not build":
                    best = outcome(name, "does not run", last(error))
                tries = chain(with_places(inputs, config, error), tries)
                continue
            try:
                return examine(name, model, inputs)
            except Exception as error:
                return outcome(name, "failed", last(error))
    return best


def _variants(config_class: type, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Configurations to try and, where somebody wrote them down, their inputs."""
    if name in BY_HAND:
        settings, inputs = BY_HAND[name]()
        yield config_class(**settings), inputs
    else:
        yield from ((config, {}) for config in tiny_configs(config_class))


def examine(name: str, model: torch.nn.Module, inputs: Any) -> dict[str, Any]:
    start = time.perf_counter()
    groups, misses = heads_from_table(model)
    completed = complete(model, inputs, groups)
    refused = [r for r in completed.reports if r.status == "wrong"]
    verified = [r for r in completed.reports if r.status == "verified"]
    inferred = [g.name for g in completed.groups if g.family == "inferred"]
    if refused:
        return outcome(name, "refused", f"{len(refused)} groups: {refused[0]}"[:300])
    if not verified:
        looks = completed.groups or completed.misses or misses or _looks_like_attention(model)
        note = "; ".join(f"{k}: {v}" for k, v in {**completed.misses, **misses}.items())
        if completed.groups:
            note = f"untraced: {', '.join(completed.untraced)}; {note}"
        return outcome(name, "missed" if looks else "none", note[:300])
    status = "partly" if completed.untraced else "inferred" if inferred else "table"
    notes = {r.note for r in verified if r.note} | {f"untraced: {name}, ..." for name in completed.untraced[:1]}
    return outcome(
        name,
        status,
        "; ".join(sorted(notes)),
        groups=len(completed.groups),
        verified=len(verified),
        inferred=len(inferred),
        leak=max(r.leak for r in verified),
        families=sorted({g.family for g in completed.groups}),
        classes=proved_classes(model, completed),
        mixed=len(completed.mixed),
        unresolved=completed.misses,
        inputs=sorted(inputs) if isinstance(inputs, dict) else [],
        seconds=round(time.perf_counter() - start, 2),
    )


def proved_classes(model: torch.nn.Module, completed: Completed) -> list[str]:
    """List "family module.Class" of every attention module whose groups are all proved as the table has them."""
    modules = {clean(name): module for name, module in model.named_modules()}
    groups: dict[str, list[HeadGroup]] = {}
    for group in completed.groups:
        groups.setdefault(module_of(group), []).append(group)
    mixed = {report.name.rpartition(".")[0] for report in completed.mixed}
    return sorted(
        {
            f"{each[0].family} {kind.__module__}.{kind.__qualname__}"
            for name, each in groups.items()
            if name not in mixed and all(g.proof == "proved" and g.family != "inferred" for g in each)
            for kind in [type(modules[name])]
        }
    )


def _looks_like_attention(model: torch.nn.Module) -> bool:
    return any("attention" in type(m).__name__.lower() for m in model.modules())


def outcome(name: str, status: str, note: str, **more: Any) -> dict[str, Any]:
    return {"architecture": name, "status": status, "note": note, "code": code_version(), **more}


@cache
def code_version() -> str:
    """A digest of the package that finds heads, so that kept results say which code made them."""
    files = sorted(Path(repulsive.heads.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def last(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = re.sub(r"/\S*/", "", str(error))  # no paths of this machine in the table
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"[:300]


def write(out: Path, library: str, results: list[dict[str, Any]]) -> None:
    version = importlib.metadata.version(library)
    counts = Counter(r["status"] for r in results)
    verified = sum(r.get("verified", 0) for r in results)
    groups = sum(r.get("groups", 0) for r in results)
    ran = sum(counts[s] for s in ("table", "inferred", "partly", "missed", "refused", "failed"))
    good = sum(counts[s] for s in ("table", "inferred", "partly"))
    versions = {library: version, "torch": torch.__version__, "date": str(date.today())}
    (out / f"{library}.json").write_text(
        json.dumps({"versions": versions, "counts": counts, "results": results}, indent=1)
    )
    lines = [
        "# Survey: whose heads are found and proved",
        "",
        f"{len(results)} architectures of {library} {version}, torch {versions['torch']}, {versions['date']}. "
        f"Made by `python -m studies.survey.run --out results/survey --library {library}`.",
        "",
        f"Of {ran} that have attention, build and run, **{good - counts['partly']} "
        f"({100 * (good - counts['partly']) / max(ran, 1):.0f} %) are found and verified throughout**, "
        f"{counts['partly']} more where the example ran ({100 * good / max(ran, 1):.0f} % together). "
        f"Of their {groups} groups {verified} are verified by the trace, "
        f"{groups - verified} known to the table alone because the example did not reach them. Architectures with a "
        f"slice that the trace contradicts: {counts['refused']}.",
        "",
        "Results by version of the code that made them (kept results are not run again): "
        + ", ".join(f"{code} {n}" for code, n in Counter(r.get("code", "earlier") for r in results).items())
        + f"; this version is {code_version()}.",
        "",
        "| status | architectures | meaning |",
        "| --- | --- | --- |",
        *(f"| {status} | {counts[status]} | {meaning} |" for status, meaning in STATUSES.items()),
        "",
        "| architecture | status | groups | verified | inferred | families | note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        cells = [r.get(x, "") for x in ("groups", "verified", "inferred")]
        note = str(r["note"]).replace("|", "/").replace("\n", " ")[:160]
        lines.append(
            f"| {r['architecture']} | {r['status']} | {' | '.join(map(str, cells))} | "
            f"{', '.join(r.get('families', []))} | {note} |"
        )
    (out / f"{library}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
