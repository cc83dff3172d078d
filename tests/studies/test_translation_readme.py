"""The page of the translation study agrees with the files in results/translation."""

import json
from pathlib import Path


def test_the_page_of_results_has_the_numbers_of_heads():
    root = Path(__file__).resolve().parents[2] / "results" / "translation"
    page = (root / "README.md").read_text()
    models = json.loads((root / "heads.json").read_text())["models"]
    for name, label in (("plain", "MA"), ("published", "SVGD, as published")):
        for metric, title, decimals in (("nll", "NLL", 2), ("bleu", "BLEU", 1)):
            values = [list(model[metric].values()) for model in models if model["method"] == label]
            cells = " | ".join(f"{sum(each) / len(each):.{decimals}f}" for each in values)
            assert f"| {name}: {title} | {cells} |" in page
