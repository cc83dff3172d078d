"""Loggers of training runs: TensorBoard, W&B, MLflow, trackio, and those of other packages. All write local files only.

interface.py    the protocol `Logger`, and what a logger knows about its run
open_loggers.py loggers by name, and the group that forwards to all of them
quiet.py        settings of other packages for the duration of a block: no output, no network
tensorboard.py, wandb.py, mlflow.py, trackio.py    one logger each
"""
