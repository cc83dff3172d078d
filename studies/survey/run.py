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
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from studies.survey.by_hand import BY_HAND, CHANGED
from studies.survey.dummies import example_inputs, repaired
from studies.survey.examine import code_version, error_text, examine, outcome
from studies.survey.limits import limited
from studies.survey.shrink import tiny_configs, too_large
from studies.survey.table import write_table


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
            result = limited(name, options.seconds, options.gigabytes, survey)
            kept.write_text(json.dumps(result, indent=1))
            print(f"{name:32} {result['status']:15} {result['note'][:100]}", flush=True)
        results.append(result)
    if not options.only:
        write_table(options.out, options.library, results)


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
            result = limited(name, options.seconds, options.gigabytes, survey)
            repeated.append(name)
            print(f"{name:32} {result['status']:15} {result['note'][:100]}", flush=True)
        results.append(result)
    write_table(options.out, options.library, results, earlier["versions"], repeated)


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
            best["note"] = best["note"] or error_text(error)
            continue
        tries = iter([given]) if given else example_inputs(model, config)
        while (inputs := next(tries, None)) is not None:
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:
                if best["status"] == "does not build":
                    best = outcome(name, "does not run", error_text(error))
                tries = chain(repaired(inputs, model, config, error), tries)
                continue
            try:
                return examine(name, model, inputs)
            except Exception as error:
                return outcome(name, "failed", error_text(error))
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


if __name__ == "__main__":
    main()
