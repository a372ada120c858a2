"""Tables that tests share: a few rows at two sites, written as CSV, and read into clients."""

from __future__ import annotations

from scaffpd.data.tabular.clients import read_clients
from scaffpd.data.tabular.settings import TableSettings

N = 24  # rows, at two sites
X = [k * 1.25 for k in range(N)]
PLAIN = [("ab"[k % 2], X[k], k % 3 % 2) for k in range(N)]
HEADER = ("site", "x", "ill")


def text(rows=PLAIN, header=HEADER, mark=",", decimal="."):
    """CSV with another separator or decimal mark."""
    lines = [mark.join(str(cell) for cell in row).replace(".", decimal) for row in rows]
    return "\n".join([mark.join(header), *lines]) + "\n"


def with_column(cell, name="z", rows=PLAIN):
    """The rows with one more column, made of the row's number."""
    return text([(*row, cell(k)) for k, row in enumerate(rows)], (*HEADER, name))


def labelled(cell):
    """The rows with another target."""
    return text([(site, x, cell(k)) for k, (site, x, _) in enumerate(PLAIN)])


def write(folder, content, name="a.csv"):
    """Write a file, and return its path."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(*files, seed=0, **more):
    """Read files into clients; by default `site` is the client and `ill` the target."""
    settings = {"file": files, "client": "site", "target": "ill", **more}
    return read_clients(TableSettings(**settings), seed)


def opened(folder, content, name="a.csv", **more):
    """Write a file and read it into clients."""
    return read(write(folder, content, name), **more)
