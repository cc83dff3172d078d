"""Datasets of the paper: the commands that prepare them, and what counts as the paper's data."""

import json
import shlex

import pytest
import typer

from repulsive.cli.app import app
from repulsive.errors import DataError
from repulsive.lab.engine.built_in import names
from repulsive.lab.paper.catalogue import ARTEFACTS
from repulsive.lab.paper.datasets import DATASETS, check_prepared, choose_datasets, inspect_dataset
from repulsive.lab.paper.mismatch import OTHER, SMALLER, Mismatch, combine
from repulsive.lab.paper.options import Options


def folder(root, name, rows, **more):
    place = DATASETS[name].folder(root)
    place.mkdir(parents=True)
    manifest = {"format": 1, "files": {}, "rows": dict(zip(("train", "dev", "test"), rows, strict=True)), **more}
    (place / "manifest.json").write_text(json.dumps(manifest))


def test_one_error_names_every_missing_dataset_and_its_command(tmp_path):
    folder(tmp_path, "age", (1, 1, 1))
    with pytest.raises(DataError) as error:
        check_prepared([DATASETS[name] for name in ("age", "yelp", "cola")], tmp_path)
    message = str(error.value)
    assert "2 of 3 prepared datasets are missing" in message and "\n" not in message
    assert f"repulsive prepare yelp --data RAW --vectors GLOVE --size 300 --out {tmp_path}/yelp" in message
    assert f"repulsive prepare glue --task cola --data RAW --vocabulary VOCAB --out {tmp_path}/glue/cola" in message
    assert "prepare age" not in message
    check_prepared([DATASETS["age"]], tmp_path)


@pytest.mark.parametrize("name", DATASETS)
def test_commands_have_only_options_that_prepare_has(name, tmp_path):
    verb, dataset, *words = shlex.split(DATASETS[name].command(tmp_path).removeprefix("repulsive "))
    params = typer.main.get_group(app).commands[verb].commands[dataset].params
    known = {option for param in params if not param.hidden for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_wmt14_is_prepared_and_trained_as_the_paper_has_it():
    """The paper's sacreBLEU is case.mixed, its script has no weight decay, and fairseq's removes pairs by ratio 1.5."""
    words = {name: shlex.split(DATASETS[name].prepare) for name in ("wmt14", "europarl", "iwslt14")}
    for name in ("wmt14", "europarl"):
        assert "--no-lowercase" in words[name] and words[name][words[name].index("--source") + 1] == "en"
    for name in ("wmt14", "iwslt14"):
        assert words[name][words[name].index("--ratio") + 1] == "1.5"
    options = Options(seeds=1)
    (row,) = (r for r in ARTEFACTS["table2"].run_sets(options) if r.recipe == "wmt14/ma")
    recipe = row.specs(options)[0].recipe
    assert row.folder(options) == options.runs / "wmt14" / "ma"  # where `repulsive train wmt14/ma` trains
    assert (recipe.optimizer.weight_decay, recipe.optimizer.lr, recipe.model.heads) == (0, 7e-4, 8)
    assert (recipe.model.feed_forward, recipe.model.dropout, recipe.training.batch) == (2048, 0.1, 25_000)
    assert (recipe.training.average, recipe.search.beam, recipe.search.lenpen) == (5, 4, 0.6)


@pytest.mark.parametrize(
    ("name", "rows", "more", "mismatch", "kind"),
    [
        ("yelp", (500_000, 2000, 2000), {}, "", ""),
        ("yelp", (106_768, 2000, 2000), {}, "106,768 items of train instead of 500,000", SMALLER),
        ("yelp", (600_000, 2000, 2000), {}, "600,000 items of train instead of 500,000", OTHER),
        ("yelp", (500_000, 2000, 200), {}, "200 items of test instead of 2,000", SMALLER),
        ("iwslt14", (160_239, 7283, 6750), {"settings": {"source": "de", "target": "en"}}, "", ""),
        ("iwslt14", (160_239, 7283, 6750), {"settings": {"source": "en", "target": "de"}}, "from en into de", OTHER),
        ("multi30k", (29_000, 1014, 1000), {}, "multi30k instead of the paper's iwslt14", OTHER),
        ("pretrain", (1, 1, 1), {"documents": {"train": 8_000_000, "dev": 13_000}}, "", ""),
        ("pretrain", (1, 1, 1), {"documents": {"train": 1000}}, "1,000 documents", SMALLER),
    ],
)
def test_data_are_the_papers_by_size_and_languages(tmp_path, name, rows, more, mismatch, kind):
    folder(tmp_path, name, rows, **more)

    def result(**options):
        return inspect_dataset(DATASETS[name], Options(tmp_path, **options)).mismatch

    assert result() is None if not mismatch else (result().reason.startswith(mismatch) and result().kind == kind)
    assert result(toy=True) == Mismatch("toy data")
    share = result(changes=("data.share = 0.1",))
    assert result(changes=("data.share=1.0",)) == result()
    assert share.reason.startswith(mismatch or "data.share=0.1") and share.kind == (kind or SMALLER)


def test_the_worst_of_several_mismatches_counts():
    smaller, other, toy = Mismatch("a", SMALLER), Mismatch("b", OTHER), Mismatch("c")
    assert combine([None, smaller]) == smaller and combine([smaller, other, None]) == other
    assert combine([smaller, toy, other]) == toy and combine([None]) is combine([]) is None


def test_choosing_no_fitting_dataset_is_an_error():
    papers = ("iwslt14", "wmt14")
    assert [data.name for data in choose_datasets("table2", papers, ())] == ["iwslt14", "wmt14"]
    assert [data.name for data in choose_datasets("table2", papers, ("yelp", "multi30k"))] == ["multi30k"]
    with pytest.raises(DataError, match="table2: cannot use yelp; choose --datasets from iwslt14, wmt14, multi30k"):
        choose_datasets("table2", papers, ("yelp",))
    with pytest.raises(DataError, match="unknown dataset 'yelb'"):
        choose_datasets("table2", papers, ("yelb",))


@pytest.mark.parametrize("name", ARTEFACTS)
def test_every_run_set_has_a_recipe(name):
    options = Options(seeds=2)
    for row in ARTEFACTS[name].run_sets(options):
        assert row.recipe in names()
        specs = row.specs(options)
        assert specs[0].recipe.task == row.dataset.kind and len(specs) == (row.seeds or 2)
