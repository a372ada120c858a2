"""Tables that tests share: a few rows at two sites, written as CSV, and read into clients."""

from types import SimpleNamespace

from scaffpd.data.tabular.clients import read_clients
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.pipeline.columns import Plan, agreed
from scaffpd.pipeline.sites import SitesHere

N = 24  # rows, at two sites
X = [k * 1.25 for k in range(N)]
PLAIN = [("ab"[k % 2], X[k], k % 3 % 2) for k in range(N)]
HEADER = ("site", "x", "ill")


def text(rows=PLAIN, header=HEADER, mark=",", decimal="."):
    lines = [mark.join(str(cell) for cell in row).replace(".", decimal) for row in rows]
    return "\n".join([mark.join(header), *lines]) + "\n"


def with_column(cell, name="z", rows=PLAIN):
    return text([(*row, cell(k)) for k, row in enumerate(rows)], (*HEADER, name))


def labelled(cell):
    return text([(site, x, cell(k)) for k, (site, x, _) in enumerate(PLAIN)])


def write(folder, content, name="a.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(*files, seed=0, **more):
    settings = {"file": files, "client": "site", "target": "ill", **more}
    source = TableSettings(**settings)
    found = read_clients(source).clients(seed)
    return agreed_on(found, source.curves == "on")


def agreed_on(found, curves=False, pairs=0, model=None):
    """Clients of a table that have agreed on columns and scale, and their encoded rows."""
    encoding = agreed(found.schema, SitesHere.of(found.rows), Plan(model, curves, pairs))
    encoded = [own.encoded(*encoding) for own in found.rows]
    more = {"task": found.task, "encoded": encoded, **encoding._asdict()}
    return SimpleNamespace(**(vars(found) | more))


def opened(folder, content, name="a.csv", **more):
    return read(write(folder, content, name), **more)
