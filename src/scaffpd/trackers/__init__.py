"""Callbacks that show a run elsewhere: `train(..., callbacks=[TensorBoard("runs/x")])`. None is on by default."""

from scaffpd.trackers.mlflow import MLflow
from scaffpd.trackers.tensorboard import TensorBoard

__all__ = ["MLflow", "TensorBoard"]
