"""Answers to the test sets of GLUE, as the benchmark wants them."""

import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError
from repulsive.lab.runs.score import score
from repulsive.lab.runs.submission import predict
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.submission import submission
from tests.lab.systems.glue import toy_glue
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


def test_a_submission_has_words_and_a_header():
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]])
    assert submission(TASKS["mnli"], logits, [0, 1]) == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert submission(TASKS["qnli"], logits[:, :2], [4, 2]) == "index\tprediction\n4\tnot_entailment\n2\tentailment\n"
    points = torch.tensor([-0.3, 2.34567, 7.0])
    assert submission(TASKS["sts"], points, [0, 1, 2]) == "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n"


def test_files_are_called_as_the_benchmark_wants():
    names = {name: list(task.submissions.values()) for name, task in TASKS.items()}
    assert names == {
        "cola": ["CoLA.tsv"],
        "sst": ["SST-2.tsv"],
        "mrpc": ["MRPC.tsv"],
        "sts": ["STS-B.tsv"],
        "qqp": ["QQP.tsv"],
        "mnli": ["MNLI-m.tsv", "MNLI-mm.tsv"],
        "qnli": ["QNLI.tsv"],
        "rte": ["RTE.tsv"],
    }


def test_predictions_of_a_run(mnli, tmp_path, capsys):
    words = ["evaluate", str(mnli.folder.path), "--device", "cpu"]
    assert run([*words, "--predict", str(tmp_path / "answers")]) == 0
    files = [tmp_path / "answers" / name for name in ("MNLI-m.tsv", "MNLI-mm.tsv")]
    assert capsys.readouterr().out.splitlines() == list(map(str, files))
    for part, name in TASKS["mnli"].submissions.items():
        header, *lines = (tmp_path / "answers" / name).read_text().splitlines()
        assert header == "index\tprediction" and len(lines) == 9
        mnli.bare.eval()
        with torch.inference_mode():
            best = mnli.task.answers(mnli.bare, part).argmax(-1).tolist()
        assert lines == [f"{i}\t{TASKS['mnli'].classes[number]}" for i, number in enumerate(best)]
    assert run([*words, "--part", "predict"]) == 2
    assert "its labels are not public" in capsys.readouterr().err
    (again,) = score([mnli.folder.path], "mismatched", device="cpu")
    assert again.cells["accuracy"].mean == mnli.folder.result["mismatched"]["accuracy"]


def test_predictions_that_cannot_be(data, tmp_path, capsys):
    for seed in (0, 1):
        toy_glue.train(data, "rte", tmp_path / "runs" / f"seed-{seed}", "training.epochs=1", f"seed={seed}")
    with pytest.raises(ConfigError, match="holds seeds 0, 1; a submission has the answers of one"):
        predict(tmp_path / "runs", tmp_path / "out", device="cpu")
    bare = toy_glue.make_data(tmp_path / "bare", "rte")
    (bare / "raw" / "RTE" / "test.tsv").unlink()
    settings = {"glue_task": "rte", "vocabulary": bare / "vocab.txt", "force": True}
    toy_glue.prepare("glue", bare / "raw", bare / "rte", **settings)
    with pytest.raises(ConfigError, match=r"was prepared without test\.tsv"):
        predict(tmp_path / "runs" / "seed-0", tmp_path / "out", bare / "rte", "cpu")
    assert run(["evaluate", "a", "b", "--predict", str(tmp_path / "out")]) == 2
    assert "one run at a time" in capsys.readouterr().err and not (tmp_path / "out").exists()
