"""Survey of architectures: find and prove the heads of every architecture of the installed transformers or timm.

    python -m studies.survey.run --out results/survey
    python -m studies.survey.run --out results/survey --library timm --jobs 8

Needs transformers or timm; no downloads. Writes a table and JSON to `--out`.

Each architecture is built from its default configuration, shrunk and with random weights, run once on dummy inputs, and
passed to `find_heads` with that example. Each runs in a forked process with a time and a memory limit. Results are kept
in `--cache` and reused by the same code: `--again NAME` repeats some, `--stale` also reuses those of other code.
`--update NAME` (or a status) repeats some in the table of `--out`, which then lists them with the date.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from studies.survey.by_hand import BY_HAND, CHANGED
from studies.survey.dummies import example_inputs, repaired
from studies.survey.shrink import tiny_configs, too_large

import repulsive.heads
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import clean, module_of
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.infer import Completed, complete
from repulsive.heads.trace.mixing import CHANNELS
from repulsive.safety.markdown import format_table

STATUSES = {
    "table": "every group known to the table and verified by the trace",
    "inferred": "verified, at least one group inferred by the trace",
    "partly": "verified in part; the example does not reach the rest (a tower without input), or heads are mixed",
    "none": "no multi-head dot-product attention over tokens in the shrunk model",
    "missed": "attention that is neither known nor inferred",
    "refused": "the trace contradicts the table and cannot correct it",
    "failed": "`find_heads` raised an error",
    "does not build": "the shrunk configuration is refused",
    "does not run": "no dummy input is accepted",
    "stopped": "over the time or memory limit",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/survey"), help="folder of the table")
    cache = Path(tempfile.gettempdir()) / "repulsive-survey"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of finished architectures")
    parser.add_argument("--library", choices=["transformers", "timm"], default="transformers")
    parser.add_argument("--jobs", type=int, default=1, help="architectures in parallel")
    parser.add_argument("--only", nargs="*", help="architectures (model types) to survey")
    parser.add_argument("--again", nargs="*", default=[], help="architectures or statuses to repeat")
    parser.add_argument("--update", nargs="+", help="repeat these architectures or statuses of the table in --out")
    parser.add_argument("--stale", action="store_true", help="also reuse results of other versions of the code")
    parser.add_argument("--seconds", type=int, default=60, help="time limit of an architecture")
    parser.add_argument("--gigabytes", type=int, default=8, help="memory limit of an architecture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.update:
        update(options)
        return
    names = options.only or (timm_models() if options.library == "timm" else architectures())
    if not names:
        raise SystemExit("studies.survey.run: timm is not installed; pip install timm")
    if options.jobs > 1:
        fill_cache(names, options)
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


def update(options: argparse.Namespace) -> None:
    """Repeat some architectures of an earlier table and keep the results of the others."""
    earlier = json.loads((options.out / f"{options.library}.json").read_text())
    versions = {name: importlib.metadata.version(name) for name in (options.library, "torch")}
    different = [name for name, version in versions.items() if earlier["versions"][name] != version]
    if different:
        raise SystemExit(f"studies.survey.run: the table is of another version of {different[0]}; repeat all of it")
    architectures()  # imports transformers once, before processes are forked
    results, repeated = [], []
    for result in earlier["results"]:
        name = result["architecture"]
        if name in options.update or result["status"] in options.update:
            result = limited(name, options.seconds, options.gigabytes)
            repeated.append(name)
            print(f"{name:32} {result['status']:15} {result['note'][:100]}", flush=True)
        results.append(result)
    write(options.out, options.library, results, earlier["versions"], repeated)


def fill_cache(names: list[str], options: argparse.Namespace) -> None:
    """Survey architectures in several processes; the caller repeats those that left no result."""
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
    """One model per file of timm, the smallest by its name; empty if timm is not installed."""
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
    """Survey one architecture in a forked process, with limits on time and memory."""
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
        except BaseException as error:  # any error is the result of this architecture
            result = outcome(name, "stopped" if isinstance(error, MemoryError) else "does not build", last(error))
        os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else outcome(name, "stopped", f"no answer within {seconds} s, {gigabytes} GB")


def survey(name: str) -> dict[str, Any]:
    """Build and run an architecture, then find and prove its heads."""
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
                tries = chain(repaired(inputs, model, config, error), tries)
                continue
            try:
                return examine(name, model, inputs)
            except Exception as error:
                return outcome(name, "failed", last(error))
    return best


def _variants(config_class: type, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Configurations to try and, if they are in `BY_HAND`, their inputs."""
    if name in BY_HAND:
        settings, inputs = BY_HAND[name]()
        yield config_class(**settings), inputs
    elif name in CHANGED:
        config = next(tiny_configs(config_class))
        for path, value in CHANGED[name].items():
            part, _, setting = path.rpartition(".")
            setattr(getattr(config, part) if part else config, setting, value)
        yield config, {}
    else:
        yield from ((config, {}) for config in tiny_configs(config_class))


def examine(name: str, model: torch.nn.Module, inputs: Any, completed: Completed | None = None) -> dict[str, Any]:
    """Find and prove the heads of a model, or report those of `completed`."""
    start = time.perf_counter()
    groups, misses = heads_from_table(model)
    completed = completed or complete(model, inputs, groups)
    refused = [r for r in completed.reports if r.status == "wrong"]
    verified = [r for r in completed.reports if r.status == "verified"]
    inferred = [g.name for g in completed.groups if g.family == "inferred"]
    if refused:
        return outcome(name, "refused", f"{len(refused)} groups: {refused[0]}"[:300])
    if not verified:
        looks = completed.misses or misses or _looks_like_attention(model)
        is_missed = bool(completed.groups) or (bool(looks) and completed.has_attention)
        note = "; ".join(f"{k}: {v}" for k, v in {**completed.misses, **misses}.items())
        if completed.groups:
            note = f"untraced: {', '.join(completed.untraced)}; {note}"
        if looks and not is_missed:
            note = f"no dot-product attention over tokens; {note}" if note else "no product of queries and keys"
        return outcome(name, "missed" if is_missed else "none", note[:300])
    mixed = [report for report in completed.mixed if report.note != CHANNELS]
    status = "partly" if completed.untraced or mixed else "inferred" if inferred else "table"
    notes = {r.note for r in verified if r.note} | {f"untraced: {name}, ..." for name in completed.untraced[:1]}
    notes |= {f"{report.name} left out: {report.note}" for report in mixed[:1]}
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
        mixed=len(mixed),
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
    """A digest of the package `heads`, which identifies the code that made a cached result."""
    files = sorted(Path(repulsive.heads.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def last(error: BaseException) -> str:
    """The message of an error and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = re.sub(r"/\S*/", "", str(error))  # without local paths
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"[:300]


def write(
    out: Path,
    library: str,
    results: list[dict[str, Any]],
    versions: dict[str, Any] | None = None,
    repeated: Sequence[str] = (),
) -> None:
    """Write the table and the JSON of a survey; `versions` is that of an earlier table, of which some are repeated."""
    if versions is None:
        names = {library: importlib.metadata.version(library), "torch": torch.__version__}
        versions = names | {"date": str(date.today())}
    elif repeated:
        again = sorted({*versions.get("repeated", {}).get("architectures", ()), *repeated})
        versions = versions | {"repeated": {"date": str(date.today()), "architectures": again}}
    counts = Counter(r["status"] for r in results)
    verified = sum(r.get("verified", 0) for r in results)
    groups = sum(r.get("groups", 0) for r in results)
    ran = sum(counts[s] for s in ("table", "inferred", "partly", "missed", "refused", "failed"))
    good = sum(counts[s] for s in ("table", "inferred", "partly"))
    (out / f"{library}.json").write_text(
        json.dumps({"versions": versions, "counts": counts, "results": results}, indent=1)
    )
    complete = good - counts["partly"]
    codes = Counter(result.get("code", "earlier") for result in results)
    lines = [
        "# Survey: architectures whose heads are found and proved",
        "",
        f"{len(results)} architectures of {library} {versions[library]}, torch {versions['torch']}, "
        f"{versions['date']}. Made by `python -m studies.survey.run --out results/survey --library {library}`.",
        "",
        f"Of {ran} that have attention, build and run, **{complete} ({100 * complete / max(ran, 1):.0f} %) are found "
        f"and verified completely**, {counts['partly']} more in part "
        f"({100 * good / max(ran, 1):.0f} % together). Of their {groups} groups {verified} are verified by the trace; "
        f"{groups - verified} are known to the table alone, because the example did not reach them. Architectures with "
        f"a slice that the trace contradicts: {counts['refused']}.",
        "",
        "Results by version of the code that made them (cached results are reused): "
        + ", ".join(f"{code} {count}" for code, count in codes.items())
        + f"; this version is {code_version()}.",
        "",
        *_repeated(versions),
        format_table(
            ["status", "architectures", "meaning"],
            [[status, str(counts[status]), meaning] for status, meaning in STATUSES.items()],
        ),
        "",
        format_table(
            ["architecture", "status", "groups", "verified", "inferred", "families", "note"],
            [
                [
                    result["architecture"],
                    result["status"],
                    *(str(result.get(name, "")) for name in ("groups", "verified", "inferred")),
                    ", ".join(result.get("families", [])),
                    str(result["note"]).replace("|", "/").replace("\n", " ")[:160],
                ]
                for result in results
            ],
        ),
    ]
    (out / f"{library}.md").write_text("\n".join(lines) + "\n")


def _repeated(versions: dict[str, Any]) -> list[str]:
    again = versions.get("repeated")
    if not again:
        return []
    names = again["architectures"]
    return [
        f"Of these, {len(names)} were repeated until {again['date']} with the same versions: {', '.join(names)}.",
        "",
    ]


if __name__ == "__main__":
    main()
