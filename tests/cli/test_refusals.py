"""What cannot work is refused before anything is written: one sentence, exit code 2."""

import os
import sys

import pytest

from cases.commands import COLOURFUL, QUICK, TABLE, patients, ran, refusal

ROWS = "".join(f"{i},{i % 3},{i % 2}\n" for i in range(40))
OBJECTIVE = '[columns]\nage = "number"\n[objective]\nkind = "ChiSquare"\nrho = 0.1\n'


def silo(name, target="y", more=""):
    return f'name = "a"\n[data]\nfile = "{name}"\ntarget = "{target}"\n{more}'


FILES = {
    "patients.csv": patients(),
    "good.csv": "x,z,y\n" + ROWS,
    "good.toml": silo("good.csv"),
    "spoilt.parquet": "no",
    "broken.csv.gz": "no",
    "notes.doc": "",
    "wrong.toml": "name = \n",
    "empty.toml": "",
    "key.toml": '[data]\nsorce = "digits"\n',
    "federation.toml": f'silos = ["a", "b"]\n{OBJECTIVE}',
    "binary.toml": bytes(range(256)),
    "target.toml": silo("good.csv", "disease"),
    "itself.toml": silo("good.csv", more='columns = ["y"]\n'),
    "nowhere.toml": silo("nowhere.csv"),
    "word.toml": silo("data.docx"),
    "parquet.toml": silo("spoilt.parquet"),
    "splt.toml": silo("good.csv", more="[limts]\nrows = 2\n"),
    "entry.toml": 'name = "a"\n[data]\nentry = "nomodule:load"\n',
    "both.toml": silo("good.csv", more='entry = "m:load"\n'),
    "silos.toml": OBJECTIVE,
    "rho.toml": f'silos = ["a", "b"]\n{OBJECTIVE.replace("0.1", "0")}',
    "port.toml": f'silos = ["a", "b"]\nserver = "host:port"\n{OBJECTIVE}',
    "model.safetensors": "no",
    "file": "x",
    "full/file": "x",
    "empty/file": "x",
}
LINES = {
    # misspelt, too much, too little
    "silo chek": "NoSuchCommand",
    "demo --sed 1": "NoSuchOption",
    "demo more": "UsageError",
    "path --points": "BadOptionUsage",
    "train": "MissingParameter",
    "silo predict good.toml": "MissingParameter",
    # numbers
    "demo --seed -1": "BadParameter",
    "deploy local --seconds -1": "BadParameter",
    f"{QUICK} --test 1": "setting-invalid",
    f"{QUICK} --test nan": "setting-invalid",
    f"{QUICK} --l2 -1": "setting-invalid",
    f"{QUICK} --rounds 0": "setting-invalid",
    f"{QUICK} --tol -1": "setting-invalid",
    f"{QUICK} --seed -1": "setting-invalid",
    f"{TABLE} --epsilon 0": "setting-invalid",
    f"{TABLE} --epsilon 4 --delta 1": "setting-invalid",
    "path hospitals --points 0": "setting-invalid",
    # names
    f"{QUICK} --task classify": "unknown-name",
    f"{QUICK} --columns aeg": "unknown-name",
    f"{QUICK} --columns age,age": "named-twice",
    f"{QUICK} --objective ChiSqare": "unknown-name",
    "train patients.csv --client hospitl --target ill": "unknown-name",
    # options that contradict each other
    "train hospitals --client age": "option-not-applicable",
    "train hospitals good.csv": "name-goes-alone",
    "train patients.csv": "client-missing",
    "train patients.csv --client hospital": "target-missing",
    "train patients.csv --client ill --target ill": "client-is-target",
    f"{QUICK} --columns age,ill": "column-of-two-roles",
    f"{TABLE} --delta 1e-6": "delta-without-epsilon",
    f"{QUICK} --objective Agnostic --strength 1": "objective-without-strength",
    f"{QUICK} --objective Nash": "strength-missing",
    "train key.toml --strength 1": "strength-without-objective",
    # folders and files
    "train nothing.csv": "data-file-unreadable",
    "train broken.csv.gz": "file-cut-off",
    "train spoilt.parquet --client a --target b": "parquet-unreadable",
    "train notes.doc": "not-a-table",
    "train empty": "folder-without-tables",
    "demo --out file": "folder-not-writable",
    "silo predict good.toml nowhere": "model-missing",
    "silo predict good.toml model.safetensors": "not-a-model-file",
    # settings files
    "train nothing.toml": "settings-unreadable",
    "train wrong.toml": "settings-not-toml",
    "train empty.toml": "data-source-unclear",
    "train key.toml": "data-source-unclear",
    "train federation.toml": "other-settings-file",
    "silo check none.toml": "settings-unreadable",
    "silo check empty.toml": "setting-missing",
    "silo check binary.toml": "settings-not-utf8",
    "silo check federation.toml": "other-settings-file",
    "deploy local good.toml": "other-settings-file",
    "silo check entry.toml": "entry-not-found",
    "silo check both.toml": "data-source-unclear",
    "silo check target.toml": "unknown-name",
    "silo check itself.toml": "unknown-name",
    "silo check nowhere.toml": "data-file-unreadable",
    "silo check word.toml": "not-a-table",
    "deploy provision silos.toml": "setting-missing",
    "deploy provision rho.toml": "setting-invalid",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in COLOURFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("line", LINES)
def test_a_refusal_leaves_no_file(here, line):
    before = files(here)
    assert refusal(line) == LINES[line]
    assert files(here) == before


SENTENCES = {  # in red on standard error, with the nearest name; nothing on standard output
    "-x": "No such option '-x' (see scaffpd --help).",
    "train patients.csv --clinet a": "No such option '--clinet'. Did you mean '--client'?",
    "demo --seed 1.5": "Invalid value for '--seed': '1.5' is not a valid integer "
    "(see scaffpd demo --help).",
    "train patients.csv --client hospital": "A table needs --target: which column of 'patients.csv'"
    " is to be predicted? There are 'hospital', 'age', 'sex', 'note', 'ill'.",
    f"{QUICK} --task classify": "Unknown --task 'classify': did you mean 'classification'?",
    f"{QUICK} --l2 -1": '--l2 needs "auto" or a number >= 0, got -1.0.',
}


@pytest.mark.parametrize("line", SENTENCES)
def test_a_mistake_gets_one_sentence_with_the_nearest_name(here, capsys, line):
    found = ran(line, capsys, code=2)
    assert (found.out, found.err) == ("", f"{SENTENCES[line]}\n")


@pytest.mark.parametrize(
    ("line", "module", "code"),
    [
        ("deploy provision federation.toml", "nvflare", "package-missing"),
        ("silo check parquet.toml", "pyarrow", "reader-not-installed"),
    ],
)
def test_an_extra_that_is_missing(line, module, code, here, monkeypatch):
    for name in list(sys.modules):
        if name.startswith((f"{module}.", "scaffpd.deploy.flare")) or name == module:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert refusal(line) == code


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root may read and write everything"
)
def test_what_may_not_be_read_or_written(here):
    (here / "good.toml").chmod(0)
    here.chmod(0o500)
    assert refusal("silo check good.toml") == "settings-unreadable"
    assert refusal("demo --out new") == "folder-not-writable"
    here.chmod(0o700)
