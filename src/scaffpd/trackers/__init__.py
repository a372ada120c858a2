"""Callbacks that show a run elsewhere: `train(..., callbacks=[TensorBoard("runs/x")])`. None is on by default."""

from scaffpd.trackers.tracker import MLflow, TensorBoard

__all__ = ["MLflow", "TensorBoard"]
