"""Runs a module or a script for as long as the process that started it lives: who is killed takes his engine along."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def watch(parent: int) -> None:
    """End this process and its group once it has another parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    owner, sys.argv = int(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=watch, args=(owner,), daemon=True, name="watch parent").start()
    if Path(sys.argv[0]).is_file():
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
