"""Wrong inputs, and the sentence that each gets: one line on standard error, nothing on standard output, exit code 2.

`LINES` holds (command line, the sentence, whole or from its beginning). Files that a command line names are in `files`.
"""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from scaffpd import cli

ROWS = "".join(f"{i},{i % 3},{i % 2}\n" for i in range(40))
OBJECTIVE = '[objective]\nkind = "ChiSquare"\nrho = 0.1\n'


def silo(name, target="y", more=""):
    return f'name = "a"\n[data]\nfile = "{name}"\ntarget = "{target}"\n{more}'


def federation(more="", objective=OBJECTIVE):
    return f'silos = ["a", "b"]\n{objective}{more}'


TABLES = {
    "good.csv": "x,z,y\n" + ROWS,
    "semicolons.csv": "x;z;y\n1,500;2;0\n",
    "mixed.csv": "x\tz\ty\n1,5\t2.5\t0\n",
    "commas.csv": 'x,z,y\n"0,5",1,0\n"1,5",2,1\n',
    "twice.csv": "x,x,y\n1,2,0\n",
    "short.csv": "x,z,y\n1,2,0\n1,2\n",
    "long.csv": "x,z,y\n1,2,3,4\n",
    "blank.csv": "",
    "header.csv": "x,y\n",
    "binary.csv": bytes(range(256)),
    "quote.csv": 'x,y\n"1,0\n2,1\n',
    "untold.csv": "x,y\n" + "1,\n" * 30,
    "infinite.csv": "x,y\ninf,0\n1,1\n",
    "nameless.csv": "x,,y\n1,2,0\n",
    "one.csv": "x,y\n1,0\n",
    "spoilt.parquet": "no",
    "damaged.npz": "no",
}
FILES = {
    **TABLES,
    **{f"{name.partition('.')[0]}.toml": silo(name) for name in TABLES},
    "empty.toml": "",
    "binary2.toml": bytes(range(256)),
    "latin2.toml": 'name = "café"'.encode("latin-1"),
    "wrong.toml": "name = \n",
    "column.toml": silo("good.csv", more='columns = ["zz"]\n'),
    "target.toml": silo("good.csv", "disease"),
    "case.toml": silo("good.csv", "Y"),
    "itself.toml": silo("good.csv", more='columns = ["y"]\n'),
    "nowhere.toml": silo("nowhere.csv"),
    "folder.toml": silo("folder.csv"),
    "excel.toml": silo("data.docx"),
    "key.toml": 'name = "a"\n[data]\nfil = "good.csv"\n',
    "table.toml": silo("good.csv", more="[splt]\ntest = 0\n"),
    "name.toml": silo("good.csv").replace('"a"', '"St. Mary"'),
    "task.toml": silo("good.csv", more='task = "classify"\n'),
    "test.toml": silo("good.csv", more="[split]\ntest = 1.5\n"),
    "nan.toml": silo("good.csv", more="[split]\ntest = nan\n"),
    "algorithm.toml": silo("good.csv", more='[limits]\nalgorithms = ["scaffpd"]\n'),
    "entry.toml": 'name = "a"\n[data]\nentry = "nomodule:load"\n',
    "both.toml": silo("good.csv", more='entry = "m:load"\n'),
    "federation.toml": federation(),
    "silos.toml": OBJECTIVE,
    "l2.toml": federation("[model]\nl2 = -1\n"),
    "loss.toml": federation('[model]\nloss = "logisitc"\n'),
    "rho.toml": federation(objective=OBJECTIVE.replace("0.1", "0")),
    "kind.toml": federation(objective=OBJECTIVE.replace("ChiSquare", "chisquare")),
    "method.toml": federation('[algorithm]\nkind = "scaffpd"\n'),
    "port.toml": federation("[server]\nport = 99999\n"),
    "model.safetensors": "no",
    "file": "x",
    "full/file": "x",
}
LINES = [
    # misspelt commands and options
    ("dmo", "No such command 'dmo'. Did you mean 'demo'?"),
    ("xyzzy", "No such command 'xyzzy' (see scaffpd --help)."),
    ("silo chek", "No such command 'chek'. Did you mean 'check'?"),
    ("deploy lcal", "No such command 'lcal'. Did you mean 'local'?"),
    ("--versoin", "No such option '--versoin'. Did you mean '--version'?"),
    ("-x", "No such option '-x' (see scaffpd --help)."),
    ("demo --sed 1", "No such option '--sed'. Did you mean '--seed'?"),
    ("compare --clinets 3", "No such option '--clinets'. Did you mean '--clients'?"),
    ("doctor --jsn", "No such option '--jsn'. Did you mean '--json'?"),
    # too much, too little
    ("demo more", "Got unexpected extra argument (more) (see scaffpd demo --help)."),
    ("compare --rho", "Option '--rho' requires an argument."),
    ("silo check", "Missing argument 'FILE' (see scaffpd silo check --help)."),
    ("silo predict good.toml", "Missing argument 'MODEL' (see scaffpd silo predict --help)."),
    ("deploy resume", "Missing argument 'FOLDER' (see scaffpd deploy resume --help)."),
    ("deploy flare", "Missing argument 'FEDERATION' (see scaffpd deploy flare --help)."),
    # numbers
    ("compare --rho 0", "compare needs --rho > 0 and finite, got 0.0."),
    ("compare --rho -1", "compare needs --rho > 0 and finite, got -1.0."),
    ("compare --rho inf", "compare needs --rho > 0 and finite, got inf."),
    ("compare --rho much", "Invalid value for '--rho': 'much' is not a valid float"),
    ("compare --rho 0,5", "Invalid value for '--rho': '0,5' is not a valid float"),
    ("demo --seed -1", "Invalid value for '--seed': -1 is not in the range x>=0"),
    (
        "demo --seed 1.5",
        "Invalid value for '--seed': '1.5' is not a valid integer (see scaffpd demo --help).",
    ),
    ("demo --splits 1", "Invalid value for '--splits': 1 is not in the range x>=2"),
    ("compare --rounds 0", "Invalid value for '--rounds': 0 is not in the range x>=1"),
    ("compare --batch-size 0", "Invalid value for '--batch-size': 0 is not in the range x>=1"),
    ("compare --processes 0", "Invalid value for '--processes': 0 is not in the range x>=1"),
    ("compare --rho nan", "compare needs a number for --rho, got NaN."),
    ("compare --alpha 0", "compare needs --alpha > 0 and finite, got 0.0."),
    ("deploy local --seconds -1", "deploy needs --seconds > 0, got -1.0."),
    ("deploy resume here --seconds nan", "deploy needs --seconds > 0, got nan."),
    # names
    (
        "compare digts",
        "'digts' is no file, and no data set of that name is known; did you mean digits?",
    ),
    (
        "compare digits --target y",
        "'digits' brings its own clients and columns: leave --target out.",
    ),
    ("compare digits --l2 1", "'digits' brings its own model: leave --l2 out."),
    ("compare --methods FedAvg,FedPox", "Unknown method 'FedPox': did you mean 'FedProx'?"),
    ("compare --methods ,", "compare needs --methods such as FedAvg,Scaff-PD, or all."),
    # options that contradict each other
    (
        "compare hospitals --alpha 0.1",
        "The problem 'hospitals' is not cut by labels: leave --alpha out.",
    ),
    ("compare hospitals --clients 5", "The hospitals are four: leave --clients out."),
    (
        "compare synthetic --alpha 0.3",
        "The problem 'synthetic' is not cut by labels: leave --alpha out.",
    ),
    ("compare --clients 200", "dirichlet cannot give 200 clients 10 samples each out of 1797."),
    (
        "deploy local --silo good.toml",
        "--silo files belong to a federation.toml: name that as well.",
    ),
    (
        "deploy local federation.toml",
        "'federation.toml' names the silo 'a': give --silo FILE for each silo (given: none).",
    ),
    (
        "deploy local federation.toml --silo good.toml",
        "'federation.toml' names the silo 'b': give --silo FILE for each silo (given: a).",
    ),
    # folders and files
    ("demo --out file", "Cannot write to the folder 'file': it is a file."),
    ("demo --out file/below", "Cannot write to the folder 'file/below': Not a directory."),
    ("compare synthetic --out file", "Cannot write to the folder 'file': it is a file."),
    (
        "silo init --out good.toml",
        "The file 'good.toml' is there already; choose another one with --out.",
    ),
    (
        "silo init --out nowhere/silo.toml",
        "Cannot write 'nowhere/silo.toml': No such file or directory.",
    ),
    (
        "silo predict good.toml nowhere",
        "There is no file 'nowhere': name a run's model.safetensors.",
    ),
    (
        "silo predict good.toml model.safetensors",
        "'model.safetensors' is not a model that a run has written (model.safetensors).",
    ),
    ("deploy local --out file", "'file' is a file: name a folder with --out."),
    (
        "deploy local --out full",
        "The folder 'full' is not empty: choose another with --out, or go on with",
    ),
    (
        "deploy resume nowhere",
        "There is no deployment in 'nowhere': give the --out folder",
    ),
    ("deploy flare federation.toml --out file", "'file' is a file: name a folder with --out."),
    # settings files
    ("silo check none.toml", "Cannot read 'HERE/none.toml': No such file or directory."),
    ("silo check full", "Cannot read 'HERE/full': Is a directory."),
    (
        "silo check empty.toml",
        "'empty.toml' needs a name of up to 63 letters, digits, - and _ (the first a letter or digit) for name",
    ),
    ("silo check binary2.toml", "The file 'HERE/binary2.toml' is not UTF-8 text."),
    ("silo check latin2.toml", "The file 'HERE/latin2.toml' is not UTF-8 text."),
    (
        "silo check wrong.toml",
        "The file 'wrong.toml' is not TOML: Invalid value (at line 1, column 8).",
    ),
    ("silo check good.csv", "The file 'good.csv' is not TOML: "),
    (
        "silo check federation.toml",
        "The file 'federation.toml' looks like a coordinator's federation.toml; a silo's silo.toml is needed.",
    ),
    (
        "deploy local good.toml",
        "The file 'good.toml' looks like a silo's silo.toml; a coordinator's federation.toml is needed.",
    ),
    ("silo check key.toml", "Unknown key in [data] of 'key.toml', 'fil': did you mean 'file'?"),
    ("silo check table.toml", "Unknown key in 'table.toml', 'splt': did you mean 'split'?"),
    (
        "silo check name.toml",
        "'name.toml' needs a name of up to 63 letters, digits, - and _ (the first a letter or digit) for name",
    ),
    (
        "silo check task.toml",
        "Unknown data.task in 'task.toml', 'classify': did you mean 'classification'?",
    ),
    (
        "silo check test.toml",
        "'test.toml' needs a share from 0 to below 1 for split.test, got 1.5.",
    ),
    ("silo check nan.toml", "'nan.toml' needs a share from 0 to below 1 for split.test, got nan."),
    (
        "silo check algorithm.toml",
        "Unknown algorithm in 'algorithm.toml', 'scaffpd': did you mean 'ScaffPD'?",
    ),
    (
        "silo check entry.toml",
        "There is no module 'nomodule' for the entry 'nomodule:load', neither in 'HERE' nor installed.",
    ),
    ("silo check both.toml", "'both.toml' needs either file or entry in [data], and has both."),
    (
        "deploy flare silos.toml",
        "'silos.toml' needs the names of all silos (letters, digits, - and _), such as",
    ),
    ("deploy flare l2.toml", "'l2.toml' needs a number >= 0 for model.l2, got -1."),
    (
        "deploy flare loss.toml",
        "Unknown model.loss in 'loss.toml', 'logisitc': did you mean 'logistic'?",
    ),
    (
        "deploy flare rho.toml",
        "[objective] of 'rho.toml': ChiSquare needs rho > 0 and finite, got 0.",
    ),
    (
        "deploy flare kind.toml",
        "Unknown objective.kind in 'kind.toml', 'chisquare': did you mean 'ChiSquare'?",
    ),
    (
        "deploy flare method.toml",
        "Unknown algorithm.kind in 'method.toml', 'scaffpd': did you mean 'ScaffPD'?",
    ),
    (
        "deploy flare port.toml",
        "'port.toml' needs a whole number from 1 to 65535 for server.port, got 99999.",
    ),
    # tables
    (
        "silo check nowhere.toml",
        "Cannot read the data file 'HERE/nowhere.csv': No such file or directory.",
    ),
    (
        "silo check folder.toml",
        "'folder.toml' needs a table (.csv, .tsv, .json, .xlsx or .parquet, also in",
    ),
    (
        "silo check excel.toml",
        "'excel.toml' needs a table (.csv, .tsv, .json, .xlsx or .parquet, also in .gz or .zip) or an .npz file",
    ),
    (
        "silo check semicolons.toml",
        "'semicolons.csv' has '1,500' in column 'x', line 2: write numbers with a decimal point, or say",
    ),
    (
        "silo check mixed.toml",
        "'mixed.csv' has decimal commas in column 'x' and decimal points in column 'z': write all numbers alike.",
    ),
    (
        "silo check commas.toml",
        "'commas.csv' has '0,5' in column 'x', line 2: write numbers with a decimal point",
    ),
    (
        "silo check twice.toml",
        "'twice.csv' has two columns named 'x' in line 1; names must differ.",
    ),
    (
        "silo check short.toml",
        "'short.csv' has 2 values in line 3, but 3 columns: the last value belongs to 'z'.",
    ),
    ("silo check long.toml", "'long.csv' has 4 values in line 2, but 3 columns."),
    ("silo check blank.toml", "'blank.csv' is empty; a line with column names is expected first."),
    ("silo check header.toml", "'header.csv' has column names but no rows."),
    ("silo check binary.toml", "'binary.csv' is no text: save it as .csv"),
    ("silo check quote.toml", "'quote.csv' is broken in line 3: unexpected end of data."),
    ("silo check untold.toml", "'untold.csv' has no row with a value in its target column 'y'."),
    ("silo check infinite.toml", "'infinite.csv' has an infinite value in column 'x', line 2."),
    (
        "silo check nameless.toml",
        "Column 2 of 'nameless.csv' has no name; name it in line 1, or choose --columns (data.columns).",
    ),
    ("silo check one.toml", "'a' has a single row, which cannot be split; use test = 0."),
    ("silo check column.toml", "Unknown column of 'good.csv', 'zz': did you mean 'z'?"),
    (
        "silo check target.toml",
        "Unknown column of 'good.csv', 'disease': choose one of 'x', 'z', 'y'.",
    ),
    ("silo check case.toml", "Unknown column of 'good.csv', 'Y': did you mean 'y'?"),
    (
        "silo check itself.toml",
        "'itself.toml' names the target 'y' in data.columns as well; leave it out there.",
    ),
    (
        "silo check damaged.toml",
        "'damaged.npz' is no NPZ file of plain arrays: save numbers or texts by numpy.savez",
    ),
    ("silo check spoilt.toml", "'spoilt.parquet' cannot be read as Parquet: "),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder.csv").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def refused(line, sentence, folder, capsys):
    """One line on standard error that begins with the sentence; nothing else anywhere."""
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    assert cli.run(shlex.split(line)) == 2
    captured = capsys.readouterr()
    expected = sentence.replace("HERE", str(folder))
    assert captured.err.startswith(expected), captured.err
    assert not sentence.endswith((".", "?")) or captured.err == f"{expected}\n"
    assert captured.err.count("\n") == 1
    assert captured.err.rstrip("\n").endswith((".", "?", "!"))
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(("line", "sentence"), LINES, ids=[line for line, _ in LINES])
def test_one_sentence(line, sentence, files, capsys, monkeypatch):
    for name in ("SCAFFPD_DATA", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(files)
    refused(line, sentence, files, capsys)


def test_the_table_is_long_enough():
    assert len(LINES) >= 40
    assert len({line for line, _ in LINES}) == len(LINES)


@pytest.mark.parametrize(
    ("line", "module", "sentence"),
    [
        (
            "deploy flare federation.toml",
            "nvflare",
            "nvflare is not installed: pip install 'scaffpd[flare]'.",
        ),
        (
            "silo check spoilt.toml",
            "pyarrow",
            "Reading 'spoilt.parquet' needs pyarrow: pip install pyarrow.",
        ),
    ],
)
def test_an_extra_that_is_missing(line, module, sentence, files, capsys, monkeypatch):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("scaffpd.deploy.flare", "scaffpd.deploy.flower"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(files)
    refused(line, sentence, files, capsys)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root may read and write everything"
)
def test_what_may_not_be_read_or_written(files, capsys, monkeypatch, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "silo.toml").write_text(silo("good.csv"))
    (closed / "silo.toml").chmod(0)
    closed.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    refused(
        "silo check closed/silo.toml",
        "Cannot read 'HERE/closed/silo.toml': Permission denied.",
        tmp_path,
        capsys,
    )
    refused(
        "demo --out closed/new",
        "Cannot write to the folder 'closed/new': Permission denied.",
        tmp_path,
        capsys,
    )
