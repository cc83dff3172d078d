"""Which folders are needed, which commands make them, and what counts as the paper's data."""

import json
import shlex

import pytest
import typer

from repulsive.cli.app import app
from repulsive.errors import DataError
from repulsive.lab.engine.built_in import names
from repulsive.lab.paper.catalogue import ARTEFACTS
from repulsive.lab.paper.datasets import DATASETS, check_there, chosen, look
from repulsive.lab.paper.running import Options


def folder(root, name, rows, **more):
    place = DATASETS[name].folder(root)
    place.mkdir(parents=True)
    told = {"format": 1, "files": {}, "rows": dict(zip(("train", "dev", "test"), rows, strict=True)), **more}
    (place / "manifest.json").write_text(json.dumps(told))


def test_what_is_missing_is_named_in_one_error_with_its_commands(tmp_path):
    folder(tmp_path, "age", (1, 1, 1))
    with pytest.raises(DataError) as error:
        check_there([DATASETS[name] for name in ("age", "yelp", "cola")], tmp_path)
    told = str(error.value)
    assert "lacks 2 of 3" in told and "\n" not in told
    assert f"repulsive prepare yelp --data RAW --vectors GLOVE --size 300 --out {tmp_path}/yelp" in told
    assert f"repulsive prepare glue --task cola --data RAW --vocabulary VOCAB --out {tmp_path}/glue/cola" in told
    assert "prepare age" not in told
    check_there([DATASETS["age"]], tmp_path)


@pytest.mark.parametrize("name", DATASETS)
def test_commands_have_only_options_that_prepare_has(name, tmp_path):
    verb, task, *words = shlex.split(DATASETS[name].command(tmp_path).removeprefix("repulsive "))
    params = typer.main.get_group(app).commands[verb].params
    known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
    assert task and {word for word in words if word.startswith("--")} <= known


def test_wmt14_is_prepared_and_trained_as_the_paper_has_it():
    """Its sacreBLEU is of case.mixed; its script has no weight decay; fairseq's cleans pairs by ratio 1.5."""
    words = {name: shlex.split(DATASETS[name].prepare) for name in ("wmt14", "europarl", "iwslt14")}
    for name in ("wmt14", "europarl"):
        assert "--no-lowercase" in words[name] and words[name][words[name].index("--source") + 1] == "en"
    for name in ("wmt14", "iwslt14"):
        assert words[name][words[name].index("--ratio") + 1] == "1.5"
    options = Options(seeds=1)
    (row,) = (r for r in ARTEFACTS["table2"].rows(options) if r.data.name == "wmt14" and r.recipe == "europarl/ma")
    recipe = row.specs(options)[0].recipe
    assert (recipe.optimizer.weight_decay, recipe.optimizer.lr, recipe.model.heads) == (0, 7e-4, 8)


@pytest.mark.parametrize(
    ("name", "rows", "more", "other"),
    [
        ("yelp", (500_000, 2000, 2000), {}, ""),
        ("yelp", (106_768, 2000, 2000), {}, "106,768 items of train instead of 500,000"),
        ("yelp", (500_000, 2000, 200), {}, "200 items of test instead of 2,000"),
        ("iwslt14", (160_239, 7283, 6750), {"settings": {"source": "de", "target": "en"}}, ""),
        ("iwslt14", (160_239, 7283, 6750), {"settings": {"source": "en", "target": "de"}}, "from en into de"),
        ("multi30k", (29_000, 1014, 1000), {}, "multi30k instead of the paper's iwslt14"),
        ("pretrain", (1, 1, 1), {"documents": {"train": 8_000_000, "dev": 13_000}}, ""),
        ("pretrain", (1, 1, 1), {"documents": {"train": 1000}}, "1,000 documents"),
    ],
)
def test_data_are_the_papers_by_size_and_languages(tmp_path, name, rows, more, other):
    folder(tmp_path, name, rows, **more)
    found = look(DATASETS[name], tmp_path, toy=False)
    assert found.other.startswith(other) and bool(found.other) == bool(other)
    assert look(DATASETS[name], tmp_path, toy=True).other == "toy data"
    assert look(DATASETS[name], tmp_path, False, ["data.share=0.1"]).other.startswith(other or "data.share=0.1")


def test_data_sets_can_be_chosen_and_none_that_fits_is_an_error():
    papers = ("iwslt14", "wmt14")
    assert [data.name for data in chosen("table2", papers, ())] == ["iwslt14", "wmt14"]
    assert [data.name for data in chosen("table2", papers, ("yelp", "multi30k"))] == ["multi30k"]
    with pytest.raises(DataError, match="table2: none of yelp fits; it takes iwslt14, wmt14, multi30k"):
        chosen("table2", papers, ("yelp",))
    with pytest.raises(DataError, match="'yelb': is not known"):
        chosen("table2", papers, ("yelb",))


@pytest.mark.parametrize("name", ARTEFACTS)
def test_every_run_has_a_recipe_of_its_own(name):
    options = Options(seeds=2)
    for row in ARTEFACTS[name].rows(options):
        assert row.recipe in names()
        specs = row.specs(options)
        assert specs[0].recipe.task == row.data.kind and len(specs) == (row.seeds or 2)
