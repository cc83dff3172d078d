"""Loggers behind one interface; W&B, MLflow and trackio with the real packages, offline, where they are installed."""

import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest

from repulsive import HeadMonitor
from repulsive.errors import ConfigError
from repulsive.loggers.interface import LoggedRun, Logger
from repulsive.loggers.open_loggers import BUILT_IN, Loggers, check_loggers, known_loggers, open_loggers

needs = {name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed") for name in BUILT_IN}
SECRET = "s3cr3t-value-of-this-test"


class Kept:
    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def log(self, values, step):
        if step == self.fails_at:
            raise OSError("no\nspace")
        self.calls.append((dict(values), step))

    def finish(self):
        self.calls.append("finished")


def test_a_group_forwards_to_all_and_drops_one_that_fails():
    good, bad = Kept(), Kept(fails_at=2)
    group = Loggers({"good": good, "bad": bad})
    assert isinstance(group, Logger) and isinstance(good, Logger) and not isinstance(print, Logger)
    group.log({"train/loss": 1.0}, 1)
    with pytest.warns(UserWarning, match=r"^logger 'bad' failed and is not used any more \(OSError: no space\)$"):
        group.log({"train/loss": 0.5}, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group.log({"train/loss": 0.25}, 3)
        group.finish()
        group.finish()  # nothing is open any more
    assert good.calls == [({"train/loss": 1.0}, 1), ({"train/loss": 0.5}, 2), ({"train/loss": 0.25}, 3), "finished"]
    assert bad.calls == [({"train/loss": 1.0}, 1)]


def test_settings_have_no_secrets(tmp_path):
    settings = {
        "sweep.storage": f"postgresql://ann:{SECRET}@host/db",
        "hub.api_key": SECRET,
        "db_password": SECRET,
        "wandb.token": SECRET,
        "model.tokens": 64,
        "optimizer.lr": 0.1,
    }
    run = LoggedRun(tmp_path, "a", settings)
    assert SECRET not in str(run)
    assert run.settings["optimizer.lr"] == 0.1 and run.settings["model.tokens"] == 64
    assert run.settings["sweep.storage"] == "postgresql://ann:***@host/db"


def test_unknown_and_missing_loggers_are_one_line(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"^unknown logger 'wandd'; did you mean 'wandb'"):
        check_loggers(["wandd"])
    assert list(known_loggers())[:4] == ["tensorboard", "wandb", "mlflow", "trackio"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("trackio", "trackio")):
        message = rf"^logger '{name}': {package} is not installed; run: python -m pip install -e '\.\[loggers\]' -c "
        with pytest.raises(ConfigError, match=message):
            check_loggers([name])
        with pytest.raises(ConfigError, match=message):
            open_loggers([name], LoggedRun(tmp_path, "a"))
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_cannot_be_opened_closes_the_others(monkeypatch, tmp_path):
    first = Kept()
    known = {"first": lambda run: first, "broken": lambda run: 1 / 0, "number": lambda run: 3}
    monkeypatch.setattr("repulsive.loggers.open_loggers.known_loggers", lambda: known)
    with pytest.raises(ConfigError, match=r"logger 'broken' cannot be opened \(ZeroDivisionError: division by zero\)"):
        open_loggers(["first", "broken"], LoggedRun(tmp_path, "a"))
    assert first.calls == ["finished"]
    with pytest.raises(ConfigError, match="logger 'number': expected an object with log and finish, got int"):
        open_loggers(["number"], LoggedRun(tmp_path, "a"))


def test_loading_the_package_loads_no_logger():
    packages = ("wandb", "mlflow", "trackio", "tensorboard")
    code = f"import sys, repulsive.loggers.open_loggers; assert not set(sys.modules) & set({packages})"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs["tensorboard"]
def test_the_monitor_logs_to_tensorboard(tmp_path):
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch import nn

    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    logger = open_loggers(["tensorboard"], LoggedRun(tmp_path, "a"))
    with HeadMonitor(model, every=1, log=logger) as monitor:
        for _ in range(2):
            model(torch.randn(2, 5, 16))
            monitor.step()
    logger.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("heads/layer 0/entropy")]
    assert logged == [(each.step, pytest.approx(each.layers[0].values()["entropy"])) for each in monitor.history]


SCRIPT = """
import json, socket, sys
from pathlib import Path

asked = []
def guarded(real):
    def call(*args, **options):
        address = next((a for a in args if isinstance(a, tuple)), args[0] if isinstance(args[0], str) else None)
        host = address[0] if isinstance(address, tuple) else address
        if isinstance(host, str) and host not in ("127.0.0.1", "localhost", "::1") and not host.startswith("/"):
            asked.append(str(address))
        return real(*args, **options)
    return call
socket.getaddrinfo = guarded(socket.getaddrinfo)
socket.socket.connect = guarded(socket.socket.connect)

from repulsive.loggers.interface import LoggedRun
from repulsive.loggers.open_loggers import open_loggers

name, folder = sys.argv[1], Path(sys.argv[2])
for step in (-1, 2):  # a training, and its resumption
    run = LoggedRun(folder, "yelp/svgd/seed-0", {"optimizer.lr": 0.5, "data.key": "a", "db.password": "SECRET"}, step)
    logger = open_loggers([name], run)
    for number in range(step + 1, step + 4):
        distances = {"heads/distance": 2.0, "heads/distance/encoder layer 0": 3.0}
        logger.log({"train/loss": 1.0 / (number + 1), **distances}, number)
        logger.log({"dev/accuracy": 0.5}, number)
    assert logger.names == (name,)
    logger.finish()
assert asked == [], asked
"""


def run_offline(name, folder, home):
    """Log two starts of a run in a process without input, with secrets in its environment."""
    keep = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "LANG", "OMP_NUM_THREADS")}
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD"), SECRET + 16 * "0")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::UserWarning:repulsive",
            "-c",
            SCRIPT.replace("SECRET", SECRET),
            name,
            str(folder),
        ],
        env={**keep, **secrets, "HOME": str(home), "TRACKIO_DIR": str(folder / "trackio")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "", done.stdout
    for path in [*folder.rglob("*"), *home.rglob("*")]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def wandb_records(path):
    """Read a `.wandb` file: a header of 7 bytes, then records in the log format of LevelDB, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.slow
@needs["wandb"]
def test_wandb_offline(tmp_path, home):
    run_offline("wandb", tmp_path / "run", home)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    logged = []
    for path in files:
        rows, config = {}, {}
        for record in wandb_records(path):
            for item in record.history.item:
                rows.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
            for item in record.run.config.update:
                config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            if record.run.run_id:
                assert (record.run.project, record.run.display_name) == ("repulsive", "yelp/svgd/seed-0")
                assert record.run.host == "" and record.run.git.remote_url == ""
        assert config["optimizer.lr"] == 0.5 and config["db.password"] == "***"
        logged.append((rows["_step"], rows["train/loss"], rows["dev/accuracy"]))
    assert sorted(logged) == [
        ([0, 1, 2], [1.0, 0.5, pytest.approx(1 / 3)], [0.5] * 3),
        ([3, 4, 5], [0.25, 0.2, pytest.approx(1 / 6)], [0.5] * 3),
    ]


@pytest.mark.slow
@needs["mlflow"]
def test_mlflow_with_a_file_store(tmp_path, home, monkeypatch):
    run_offline("mlflow", tmp_path / "run", home)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("repulsive")
    runs = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    assert runs[0].data.tags["mlflow.runName"] == "yelp/svgd/seed-0" and runs[0].data.params["db.password"] == "***"
    for run, first in zip(runs, (0, 3), strict=True):
        loss = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
        assert loss == [(step, pytest.approx(1 / (step + 1))) for step in range(first, first + 3)]
        assert set(run.data.metrics) == {
            "train/loss",
            "heads/distance",
            "heads/distance.encoder layer 0",
            "dev/accuracy",
        }


@pytest.mark.slow
@needs["trackio"]
def test_trackio_local(tmp_path, home):
    run_offline("trackio", tmp_path / "run", home)
    code = (
        "import json, sys\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "runs = S.get_runs('repulsive')\n"
        "print(json.dumps({name: [[row.get('step'), row.get('train/loss')] for row in S.get_logs('repulsive', name)] "
        "for name in runs}))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "run" / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    logged = json.loads(done.stdout.splitlines()[-1])
    losses = {name: [row for row in rows if row[1] is not None] for name, rows in logged.items()}
    assert losses == {
        "yelp/svgd/seed-0": [[n, pytest.approx(1 / (n + 1))] for n in range(3)],
        "yelp/svgd/seed-0 from step 3": [[n, pytest.approx(1 / (n + 1))] for n in range(3, 6)],
    }
