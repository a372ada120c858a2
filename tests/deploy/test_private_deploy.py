"""Silos with differential privacy: what leaves, what is counted, and what is not answered."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from cases.silos import Faulty, cohort, federation, locks, model_of, opened, pinned
from scaffpd import Cohort, Linear, Private
from scaffpd.data.tabular.agree import agree, declared_scale, features
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess, Message, decode, encode
from scaffpd.deploy.silo import privacy
from scaffpd.deploy.silo.dataset import predict
from scaffpd.deploy.silo.privacy import PrivacyLedger
from scaffpd.deploy.silo.records import audit
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.privacy.accountant import epsilon
from scaffpd.run.record import RunRecord
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.model_file import read_model
from scaffpd.run.settings.silo import SiloFile

METHOD = {
    "rounds = 500\ntol = 1e-6\n": "rounds = 4\n",
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 3\n\n[objective]',
}
PRIVACY = "[privacy]\nepsilon = 8\n"
OWN = "\n[privacy]\nepsilon = 20\ndelta = 1e-5\n"
WILLING = OWN + 'columns = "exact"\n'


def private(folder, more=PRIVACY, silo=WILLING, silos=2, **rest):
    path, places = federation(folder, silos, more=more, replacing=METHOD, **rest)
    for place in places.values():
        place.write_text(place.read_text() + silo)
    return path, places


def another_run(path):
    """The file of a run with an agreement of its own."""
    return (
        path.read_text()
        .replace('folder = "run"', 'folder = "next"')
        .replace("local_steps = 3", "local_steps = 2")
    )


def record(path):
    return RunRecord.read(FederationFile.read(path).folder)


def test_a_private_run_says_what_it_has_cost(tmp_path):
    path, places = private(tmp_path)
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "round limit", outcome
    assert outcome.certificate is None
    assert 0 < outcome.privacy["epsilon"] <= 8
    assert outcome.privacy["delta"] == 1e-5
    assert f"(ε, δ) = ({outcome.privacy['epsilon']:.2f}, 1e-05)" in outcome.sentence
    found = record(path)
    assert found.privacy.epsilon == outcome.privacy["epsilon"]
    assert set(found.privacy.clients) == set(places)
    for row in found.main.clients:
        assert row.epsilon == pytest.approx(outcome.privacy["epsilon"])
        assert (row.test_loss, row.test_score, row.test_rows) == (None, None, None)
        assert row.train_loss is not None
    scores = cohort(path, places).evaluate(model_of(path), "test")
    assert scores.accuracy.mean() > 0.6  # noise, and still a model


def test_books_logs_and_accounts_are_written_under_locks_that_processes_share(
    tmp_path, monkeypatch
):
    """In place of the locks that conftest.py takes away."""
    taken = set()
    locks(monkeypatch, lambda path: taken.add(path) or nullcontext())
    path, places = private(tmp_path, silos=2)
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 1"))
    coordinate(path, InProcess(opened(places)))
    assert {file.suffix for file in taken} == {".lock"}
    assert sorted(file.parent.name for file in taken) == sorted([*places] * 3)
    assert len({file.name for file in taken}) == 3


def test_what_it_has_cost_is_the_composition_of_what_was_asked(tmp_path):
    """At most R + 1 points, each a gradient and a loss; R rounds of J − 1 new local gradients."""
    path, places = private(tmp_path)
    outcome = coordinate(path, InProcess(opened(places)))
    agreed = decode_setup(path)
    releases = {}
    (books,) = places["cleveland"].parent.glob("privacy-spent-*.npz")
    with np.load(books) as kept:
        for noise, times in zip(kept["privacy.noise"], kept["privacy.times"], strict=True):
            releases[noise] = releases.get(noise, 0) + int(times)
    total = sum(times / noise**2 for noise, times in releases.items())
    assert outcome.privacy["epsilon"] == pytest.approx(epsilon(total, 1e-5), rel=1e-9)
    most = {agreed["noise"]: 7 + 6 * 2, agreed["loss_noise"]: 7}
    assert set(releases) == set(most)
    assert all(releases[kind] <= most[kind] for kind in most)


def decode_setup(path):
    import json

    return json.loads((FederationFile.read(path).folder / "setup.json").read_text())["privacy"]


def test_nothing_that_rows_have_a_part_in_leaves_without_noise(tmp_path):
    path, places = private(tmp_path)
    transport = Faulty(places)
    coordinate(path, transport)
    seen = [
        (decode(question, 2**31), decode(answer, 2**31)) for _, question, answer in transport.log
    ]
    kinds = {question.kind for question, answer in seen if answer.kind == "answer"}
    assert kinds == {"hello", "describe", "totals", "setup", "gradients", "local_updates", "spent"}
    constants = np.stack(
        [a.arrays["constants"] for q, a in seen if q.kind == "setup" and a.kind == "answer"]
    )
    assert np.all(constants == constants[0])  # the same for every silo: no fact about its rows
    exact = cohort(path, places)
    for (site, _, _), (question, answer) in zip(transport.log, seen, strict=True):
        if question.kind == "gradients" and answer.kind == "answer":
            true = exact.gradients(torch.from_numpy(question.arrays["x"].copy()))
            i = [*places].index(site)
            assert np.abs(true.each()[i].numpy() - answer.arrays["c"]).min() > 1e-12
            assert abs(true.losses[i] - answer.arrays["scalars"][0]) > 1e-12


def test_scores_and_sums_over_columns_are_refused(tmp_path):
    path, places = private(tmp_path, silo=OWN)
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "failed"
    assert 'privacy.columns = "exact"' in outcome.sentence
    for place in places.values():
        place.write_text(place.read_text().replace(OWN, WILLING))
    transport = Faulty(places)
    assert coordinate(path, transport).status == "round limit"
    _, question, _ = next(
        entry for entry in transport.log if decode(entry[1], 2**31).kind == "gradients"
    )
    message = decode(question, 2**31)
    evaluated = encode(Message("evaluate", {**message.values, "split": "train"}, message.arrays))
    reply = decode(transport.silos["va"].answer(evaluated), 2**31)
    assert reply.kind == "refused"
    assert "releases no scores" in reply.values["sentence"]


def test_sums_over_columns_stay_where_consent_is_to_noise_whatever_the_question_says(tmp_path):
    """A silo believes the request that it has consented to, not the question's own `private`."""
    path, places = private(tmp_path, silo="")
    transport = Faulty(places)
    assert 'privacy.columns = "exact"' in coordinate(path, transport).sentence
    found = [(site, decode(question, 2**31)) for site, question, _ in transport.log]
    site, totals = next((site, question) for site, question in found if question.kind == "totals")
    for private_says in (True, False, None):
        lie = encode(Message("totals", {**totals.values, "private": private_says}, totals.arrays))
        for silo in (transport.silos[site], Silo.open(places[site])):
            reply = decode(silo.answer(lie), 2**31)
            assert reply.kind == "refused"
            assert 'privacy.columns = "exact"' in reply.values["sentence"]
            assert not reply.arrays


@pytest.mark.parametrize("full", ["privacy-spent.npz", "privacy-spent-"])
def test_no_answer_leaves_before_its_release_is_on_disk(tmp_path, monkeypatch, full):
    """The disk is full as a release is written, for either ledger; the question asked again leaves
    with its cost.
    """
    path, places = private(tmp_path)
    transport = Faulty(places)
    coordinate(path, transport)
    asked = [
        (decode(question, 2**31).kind, question)
        for site, question, _ in transport.log
        if site == "va"
    ]
    first = dict(reversed(asked))
    home = places["va"].parent
    for file in (*home.glob("privacy-spent*.npz"), home / "answered.jsonl"):
        file.unlink()

    def put(silo, kind):
        return decode(silo.answer(first[kind]), 2**31)

    def no_space(file, write=privacy.atomic_write):
        if file.name.startswith(full):
            raise OSError(28, "No space left on device")
        return write(file)

    silo = Silo.open(places["va"])
    assert put(silo, "setup").kind == "answer"
    with monkeypatch.context() as patch:
        patch.setattr(privacy, "atomic_write", no_space)
        for _ in range(2):
            failed = put(silo, "gradients")
            assert (failed.kind, failed.arrays) == ("failed", {})
    assert put(silo, "gradients").kind == "answer"
    for file in home.glob("privacy-spent*.npz"):
        with np.load(file) as kept:
            assert kept["privacy.times"].sum() == 2, file  # a gradient and a loss
    later = Silo.open(places["va"])
    put(later, "setup")
    assert put(later, "spent").values["epsilon"] == silo.cohort.privacy.worst > 0
    for file in home.glob(
        "privacy-spent*.npz"
    ):  # a ledger that somebody removes is whole again with the next answer
        file.unlink()
    assert put(silo, "spent").kind == "answer"
    assert len([*home.glob("privacy-spent*.npz")]) == 2


RANGES = """
[features.ranges]
"*" = [0, 2]
age = [0, 100]
trestbps = [60, 220]
chol = [0, 600]
thalach = [50, 220]
oldpeak = [-3, 7]
"""


def test_with_declared_ranges_no_sums_over_columns_leave_and_the_model_has_none(tmp_path):
    """Silos that keep their column sums take part; the model's scale is the file's, whoever the
    patients are.
    """
    path, places = private(tmp_path, silo=OWN, more=PRIVACY + RANGES)
    transport = Faulty(places)
    assert coordinate(path, transport).status == "round limit"
    assert "totals" not in {decode(question, 2**31).kind for _, question, _ in transport.log}
    x, setup = read_model(FederationFile.read(path).folder / "model.safetensors")
    names = features(setup.schema)
    for name, centre, scale in (("age", 50.0, 25.0), ("chol", 300.0, 150.0), ("oldpeak", 2.0, 2.5)):
        assert (setup.mean[names.index(name)], setup.deviation[names.index(name)]) == (
            centre,
            scale,
        )
    assert cohort(path, places).evaluate(x, "test").accuracy.mean() > 0.6
    found = predict(transport.silos["va"].data, x, setup)
    assert len(found.predicted) == len(found.targets)


def test_one_row_changes_nothing_about_others_where_rows_are_apart(tmp_path):
    """No median, no rare category and no deviation of a private silo depends on a row that is there
    or not.
    """
    path, places = private(tmp_path, silo=OWN, more=PRIVACY + RANGES)
    table = places["va"].parent / places["va"].read_text().split('file = "')[1].split('"')[0]
    rows = table.read_text().splitlines()
    encoded = []
    for age in ("", "1e6"):
        table.write_text(
            "\n".join([rows[0], ",".join([age, *rows[1].split(",")[1:]]), *rows[2:]]) + "\n"
        )
        silo = Silo.open(places["va"])
        schema = agree(
            {"va": silo.data.describe()}, ranges=FederationFile.read(path).features.ranges
        )
        X, _ = silo.data.encoded(schema, *declared_scale(schema)).train
        encoded.append(X)
    changed = np.flatnonzero((encoded[0] != encoded[1]).any(1))
    assert len(changed) <= 1  # the row itself, where it is no held-out one
    at = features(schema).index("age")
    assert encoded[0][changed, at] == pytest.approx(
        np.zeros(len(changed))
    )  # a missing age is the middle of the range
    assert encoded[1][changed, at] == pytest.approx(
        np.full(len(changed), 2.0)
    )  # and one far off is brought into it


@pytest.mark.parametrize(
    ("ranges", "match"),
    [
        ("[features.ranges]\nage = [0, 100]\n", "No range is declared of the column"),
        (
            '[features.ranges]\n"*" = [0, 1]\nages = [0, 1]\n',
            "a range of 'ages', which is no column of numbers",
        ),
        ('[features.ranges]\n"*" = [2, 1]\n', "does not go from less to more"),
    ],
)
def test_ranges_that_make_no_sense(tmp_path, ranges, match):
    path, places = private(tmp_path, silo=OWN, more=PRIVACY + ranges)
    assert match in coordinate(path, InProcess(opened(places))).sentence


def test_a_range_is_a_pair_of_numbers(tmp_path):
    path, _ = private(tmp_path, more=PRIVACY + "[features.ranges]\nage = [1]\n")
    with pytest.raises(InputError, match=r"\[least, largest\]"):
        FederationFile.read(path)


def test_private_runs_make_one_local_step_unless_told(tmp_path):
    path, _ = federation(tmp_path, more=PRIVACY, replacing={"rounds = 500\ntol = 1e-6\n": ""})
    file = FederationFile.read(path)
    assert (file.method.local_steps, file.training.rounds) == (1, 30)


def test_a_silo_that_wants_noise_takes_no_agreement_without(tmp_path):
    path, places = private(tmp_path, more="")
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "failed"
    assert "only with differential privacy" in outcome.sentence


def test_restarts_neither_forget_nor_spend_again(tmp_path):
    """The same model and the same ε, whether silos live through the run or are new for every
    question.
    """
    path, places = private(tmp_path)
    steady = coordinate(path, InProcess(opened(places)))
    x = model_of(path)
    again = path.with_name("again.toml")
    again.write_text(path.read_text().replace('folder = "run"', 'folder = "again"'))

    script = {moment: [("restart", name) for name in places] for moment in range(6, 40, 3)}
    other = coordinate(again, Faulty(places, script))
    assert np.array_equal(model_of(again), x)
    assert (
        other.privacy == steady.privacy
    )  # every question had been answered before, and costs nothing again


def test_a_secret_that_is_replaced_costs_again_and_no_more_than_the_budget(tmp_path):
    """With other noise the same questions are other releases: the ledger counts them."""
    path, places = private(tmp_path, silo=WILLING.replace("epsilon = 20", "epsilon = 9"))
    steady = coordinate(path, InProcess(opened(places)))
    again = path.with_name("again.toml")
    again.write_text(path.read_text().replace('folder = "run"', 'folder = "again"'))
    (places["va"].parent / "privacy.key").unlink()
    other = coordinate(again, InProcess(opened(places)))
    assert other.privacy is None or other.privacy["epsilon"] <= 8 + 1e-9
    spent = next(why for why in audit(places["va"].parent / "audit.jsonl")["refused"] if "ε" in why)
    assert "budget" in spent or "cost" in spent, spent
    assert steady.privacy["epsilon"] <= 8


def test_books_that_outlive_runs_stop_at_the_silo_s_own_budget(tmp_path):
    path, places = private(tmp_path, silo=WILLING.replace("epsilon = 20", "epsilon = 9"))
    first = coordinate(path, InProcess(opened(places)))
    assert first.privacy["epsilon"] <= 8
    path.write_text(another_run(path))
    limit = round(1.05 * max(first.privacy["epsilon"], 8), 2)
    for place in places.values():
        place.write_text(place.read_text().replace("epsilon = 9", f"epsilon = {limit}"))
    second = coordinate(path, InProcess(opened(places)))
    assert second.status == "failed"
    assert f"privacy budget of ε = {limit:g}" in second.sentence
    assert (places["va"].parent / "privacy-spent.npz").exists()
    assert second.rounds >= 1
    assert f"The model of round {second.rounds} is stored" in second.sentence
    assert np.isfinite(model_of(path)).all()
    path.write_text(
        path.read_text()
        .replace('folder = "next"', 'folder = "third"')
        .replace("epsilon = 8", "epsilon = 50")
    )
    third = coordinate(path, InProcess(opened(places)))
    assert f"more than the {limit:g} of this silo's file" in third.sentence


def test_an_agreed_epsilon_is_kept_where_the_silo_s_own_is_larger(tmp_path):
    """A coordinator that goes on asking is refused at the ε that was agreed, also by a silo with a
    budget of 8.
    """
    path, places = private(
        tmp_path, more="[privacy]\nepsilon = 1\n", silo=WILLING.replace("20", "8")
    )
    transport = InProcess(opened(places))
    assert coordinate(path, transport).status == "round limit"
    silo = transport.silos["va"]
    answered = 0

    def go_on():
        nonlocal answered
        for answered in range(300):
            with silo.ledger.while_answering(silo.cohort):
                silo.cohort.gradients(silo.cohort.start() + 1 + answered)

    with pytest.raises(InputError, match=r"privacy budget of ε = 1,"):
        go_on()
    assert answered < 20
    assert silo.cohort.privacy.worst <= 1
    assert silo.cohort.account.wider.spent().worst <= 1
    # the next agreement has an ε of its own, and the silo's budget counts both
    path.write_text(another_run(path))
    again = InProcess(opened(places))
    assert coordinate(path, again).status == "round limit"
    later = again.silos["va"].cohort
    assert later.privacy.worst <= 1 < later.account.wider.spent().worst < 2


def test_with_masks_as_well(tmp_path):
    path, places = private(
        tmp_path, PRIVACY + "\n[secure]\n", WILLING + "\n[secure]\nrequired = true\n", silos=3
    )
    pinned(places)
    # noise in the losses can move nearly all weight to one silo, which then declines to be nearly
    # all of a sum
    path.write_text(path.read_text().replace("rho = 0.1\n", "rho = 0.1\ncap = 0.6\n"))
    transport = Faulty(places)
    outcome = coordinate(path, transport)
    assert outcome.status == "round limit", outcome
    assert 0 < outcome.privacy["epsilon"] <= 8
    arrays = [set(decode(answer, 2**31).arrays) for _, _, answer in transport.log]
    assert not any({"c", "d", "sum", "squares"} & parts for parts in arrays)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("[privacy]\n", "a number above 0 for privacy.epsilon, but it is missing"),
        ("[privacy]\nepsilon = 0\n", "a number above 0 for privacy.epsilon, got 0"),
        ("[privacy]\nepsilon = 1\ndelta = 2\n", "between 0 and 1"),
        ("[privacy]\nepsilon = 1\nclip = -1\n", "a number above 0 for privacy.clip"),
        ("[privacy]\nepsilons = 1\n", "epsilon"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, more, match):
    path, _ = federation(tmp_path, more=more, replacing=METHOD)
    with pytest.raises(InputError, match=match):
        FederationFile.read(path)


def test_methods_and_tolerances_that_private_runs_do_not_have(tmp_path):
    path, _ = federation(tmp_path / "a", more=PRIVACY, replacing={"tol = 1e-6": "tol = 1e-3"})
    with pytest.raises(InputError, match="A run with noise certifies nothing"):
        FederationFile.read(path)
    change = {
        "rounds = 500\ntol = 1e-6\n": "",
        '[objective]\nkind = "ChiSquare"\nrho = 0.1\n': '[algorithm]\nkind = "FedAvg"\n',
    }
    path, _ = federation(tmp_path / "b", more=PRIVACY, replacing=change)
    with pytest.raises(InputError, match="a method that asks for losses itself"):
        FederationFile.read(path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("epsilon = 1", "needs privacy.delta"),
        ('columns = "all"', "exact"),
        ("epsilon = -1\ndelta = 0.1", "above 0"),
        ("required = true", "needs privacy.epsilon and privacy.delta with privacy.required"),
        ("required = true\ndelta = 1e-5", "an ε of any size"),
    ],
)
def test_a_silo_s_settings_that_make_no_sense(tmp_path, line, match):
    _, places = private(tmp_path, silo=f"\n[privacy]\n{line}\n")
    with pytest.raises(InputError, match=match):
        Silo.open(places["va"])


def test_a_budget_is_for_every_cohort_and_is_never_ignored(tmp_path):
    """An entry's own private Cohort is held to the silo's ε; and a budget means that plain runs are
    refused.
    """
    path, places = private(
        tmp_path, silo='\n[privacy]\nepsilon = 9\ndelta = 1e-5\ncolumns = "exact"\n', more=""
    )
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "failed"
    assert "the federation has no [privacy]" in outcome.sentence
    rules = SiloFile.read(places["va"])
    own = Private(Linear("logistic", l2=0.1), noise=5.0, radius=2.0, secret=1)
    rows = np.random.default_rng(0).normal(size=(50, 3)), np.arange(50) % 2
    prepared = Cohort({"va": rows}, own)
    PrivacyLedger(rules, {"epsilon": 1.0, "delta": 1e-6}, "x").open(prepared)
    assert (prepared.account.budget, prepared.account.delta) == (1.0, 1e-6)
    assert (prepared.account.wider.budget, prepared.account.wider.delta) == (9.0, 1e-5)
    with pytest.raises(InputError, match="is not private"):
        PrivacyLedger(rules, {"epsilon": 1.0, "delta": 1e-6}, "x").open(
            Cohort({"va": rows}, Linear("logistic", l2=0.1))
        )


def test_processes_share_one_set_of_books(tmp_path):
    """Two processes of a silo, answering different questions in turn: neither overwrites what the
    other has spent.
    """
    path, places = private(tmp_path)
    transport = InProcess(opened(places))
    coordinate(path, transport)
    (books,) = places["va"].parent.glob("privacy-spent-*.npz")
    work = transport.silos["va"].cohort
    keeper = transport.silos["va"].ledger
    other = PrivacyLedger(transport.silos["va"].file, keeper.agreed, "0" * 32)
    other.file = books
    twin = Cohort({"va": (np.ones((30, work.dimension - 1)), np.arange(30) % 2)}, work.model)
    other.open(twin)
    with other.while_answering(twin):
        twin.gradients(twin.start() + 1)
    with keeper.while_answering(work):
        work.gradients(work.start() + 2)
    with np.load(books) as kept:
        total = int(kept["privacy.times"].sum())
    assert total == work.account.total
    assert total >= twin.account.total + 2
