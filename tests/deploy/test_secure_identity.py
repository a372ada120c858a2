"""Who a silo is to the others: pins, cards that an authority signs, and nothing trained where they do not fit."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID
from deploy_cases import events, is_right, model_of, run
from secure_silos import REQUIRED, leaks
from secure_silos import secured as federation
from typer.testing import CliRunner

from scaffpd.cli import app
from scaffpd.deploy.messages import Message, decode, encode
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SecureRules, SiloFile
from scaffpd.secure.keys import Authority
from scaffpd.secure.masking import Identity

DAY = datetime.timedelta(days=1)


class Office:
    """A small certificate authority."""

    def __init__(self, folder: Path, name: str = "root"):
        self.folder, self.key, self.name = folder, ec.generate_private_key(ec.SECP256R1()), name
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = self._made(name, self.key.public_key(), authority=True)
        self.file = folder / "rootCA.pem"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _made(self, name, public, authority=False, since=-DAY, until=DAY):
        now = datetime.datetime.now(datetime.UTC)

        def called(who):
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, who)])

        builder = x509.CertificateBuilder(
            called(self.name), called(name), public, x509.random_serial_number()
        )
        builder = builder.not_valid_before(now + since).not_valid_after(now + until)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=authority, path_length=None), critical=True
        )
        return builder.sign(self.key, SHA256())

    def issue(self, name, place=None, key=None, **validity):
        """client.crt and client.key of a silo, in a folder of its own."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        place = place or self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        certificate = self._made(name, key.public_key(), **validity).public_bytes(
            serialization.Encoding.PEM
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (place / "client.crt").write_bytes(certificate)
        (place / "client.key").write_bytes(private)
        return certificate, private


def secured(folder, silos=3, **how):
    return federation(folder, silos, **how)


def shown(place):
    done = CliRunner().invoke(app, ["silo", "key", str(place)])
    assert done.exit_code == 0
    return done.stdout.strip()


def add(place, text):
    place.write_text(place.read_text() + text)


def nothing_trained(path, outcome, sentence):
    assert (outcome.status, outcome.final) == ("failed", True)
    assert sentence in outcome.sentence
    assert not (FederationFile.read(path).folder / "model.safetensors").exists()


def test_silo_key_shows_the_print_of_a_key_that_stays(tmp_path):
    _, places = secured(tmp_path)
    place = places["va"]
    first = shown(place)
    assert shown(place) == first
    assert len(first) == 64
    file = place.parent / "identity.key"
    assert file.stat().st_mode & 0o077 == 0
    assert Identity.kept("va", file).card.fingerprint == first
    file.write_text("no key\n")
    done = CliRunner().invoke(app, ["silo", "key", str(place)])
    assert done.exit_code != 0
    with pytest.raises(InputError, match="cannot be read or written"):
        Identity.kept("va", file)
    with pytest.raises(InputError, match="cannot be read or written"):
        Identity.kept("va", tmp_path / "nowhere" / "identity.key")


def test_pins_that_fit_and_one_that_does_not(tmp_path):
    path, places = secured(tmp_path / "a")
    prints = {name: shown(place) for name, place in places.items()}
    pins = "".join(f'{name} = "{key}"\n' for name, key in prints.items())
    for place in places.values():
        add(place, f"\n[secure.pins]\n{pins}")
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    path, places = secured(tmp_path / "b")
    add(places["va"], f'\n[secure.pins]\ncleveland = "{"0" * 64}"\n')
    outcome, transport = run(path, places)
    nothing_trained(path, outcome, "The key of 'cleveland' is not the one that is pinned here")
    assert leaks(transport.log) == ["nothing was masked"]


def test_a_run_that_may_drop_silos_begins_without_the_one_whose_pin_does_not_fit(tmp_path):
    path, places = secured(tmp_path, 4, drop=True)
    add(places["va"], f'\n[secure.pins]\ncleveland = "{"0" * 64}"\n')
    outcome, _ = run(path, places)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places) - {"va"}
    first = events(path)[0]
    assert first["client"] == "va"
    assert "The key of 'cleveland' is not the one that is pinned here" in first["sentence"]


def test_a_pin_that_is_none(tmp_path):
    _, places = secured(tmp_path)
    add(places["va"], '\n[secure.pins]\ncleveland = "abc"\n')
    with pytest.raises(InputError, match="fingerprint of 64 digits"):
        SiloFile.read(places["va"])


def certified(folder, names=None, **issued):
    """Silos with an authority and certificates; `issued` has other certificates for some of them."""
    path, places = secured(folder)
    office = Office(folder / "office")
    for name, place in places.items():
        kit = place.parent
        how = issued.get(name, {})
        how.pop("office", office).issue(how.pop("called", name), kit, **how)
        signs = (
            "" if how is None else 'certificate = "client.crt"\ncertificate_key = "client.key"\n'
        )
        if name in (names or places):
            add(place, f'\n[secure]\nauthority = "{office.file}"\n{signs}')
    return path, places


def test_signed_cards_are_taken(tmp_path):
    path, places = certified(tmp_path)
    outcome, transport = run(path, places)
    is_right(path, places, outcome)
    assert set(outcome.members) == set(places)
    assert leaks(transport.log) == []


@pytest.fixture(scope="module")
def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "trouble", ["unsigned", "another name", "expired", "not yet", "another authority", "RSA of it"]
)
def test_cards_that_are_not_taken(tmp_path, trouble, rsa_key):
    how = {
        "unsigned": {},
        "another name": {"called": "hungarian"},
        "expired": {"since": -3 * DAY, "until": -DAY},
        "not yet": {"since": DAY, "until": 2 * DAY},
        "another authority": {"office": Office(tmp_path / "elsewhere")},
        "RSA of it": {"office": Office(tmp_path / "elsewhere"), "key": rsa_key},
    }[trouble]
    path, places = (
        certified(tmp_path, va=how)
        if how
        else certified(tmp_path, names=["cleveland", "hungarian"])
    )
    outcome, transport = run(path, places)
    words = {
        "another name": "signed in the name of 'hungarian'",
        "expired": "not valid",
        "not yet": "not valid",
    }
    nothing_trained(
        path, outcome, words.get(trouble, "not signed by a site that this authority knows")
    )
    assert leaks(transport.log) == ["nothing was masked"]


def test_a_card_can_be_signed_with_rsa_and_not_be_moved(tmp_path, rsa_key):
    office = Office(tmp_path)
    card = Identity("va", certificate=office.issue("va", key=rsa_key)).card
    authority = Authority.read(office.file)
    authority.check(card)
    other = Identity("va").card
    for changed in (
        {"key": other.key},
        {"signature": b"\0" * len(card.signature)},
        {"certificate": b"no PEM"},
    ):
        with pytest.raises(InputError, match="not signed by a site"):
            authority.check(type(card)(**{**card.__dict__, **changed}))
    short = office.issue("va", key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(InputError, match="not signed by a site"):
        authority.check(Identity("va", certificate=short).card)


def test_files_that_cannot_be_read_are_named_in_the_log_alone(tmp_path, caplog):
    _, places = secured(tmp_path)
    add(places["va"], '\n[secure]\ncertificate = "gone.crt"\ncertificate_key = "gone.key"\n')
    answer = decode(
        Silo.open(places["va"]).answer(encode(Message("card", {"question": "1"}))), 2**20
    )
    assert answer.kind == "refused"
    assert "gone" not in answer.values["sentence"]
    assert "gone.crt" in caplog.text
    with pytest.raises(InputError, match="cannot be read"):
        Authority.read(tmp_path / "nothing.pem")
    with pytest.raises(InputError, match="private key cannot be read"):
        Identity("va", certificate=(b"", b"no PEM"))


def test_a_kits_certificates_are_used_unless_the_file_names_others(tmp_path):
    office = Office(tmp_path / "kit")
    rules = SecureRules(required=True, identity=tmp_path / "identity.key")
    kit = tmp_path / "kit"
    assert rules.known_by(kit) is rules  # it is not complete
    office.issue("va", kit)
    known = rules.known_by(kit)
    assert known.authority == kit / "rootCA.pem"
    assert (known.certificate, known.certificate_key) == (kit / "client.crt", kit / "client.key")
    own = SecureRules(
        required=True, identity=tmp_path / "identity.key", authority=tmp_path / "other.pem"
    )
    assert own.known_by(kit) is own
    _, places = secured(tmp_path / "hospitals")
    silo = Silo.open(places["va"], kit)
    card = decode(silo.answer(encode(Message("card", {"question": "1"}))), 2**20).values["card"]
    assert card["certificate"].startswith("-----BEGIN CERTIFICATE")


def test_a_silo_that_another_one_plays_is_noticed(tmp_path):
    path, places = secured(tmp_path)
    forged = Identity("va").card.values()

    def swapped(answer):
        message = decode(answer, 2**31)
        if "card" not in message.values:
            return answer
        return encode(Message(message.kind, {**message.values, "card": forged}, message.arrays))

    outcome, _ = run(path, places, {1: [("lie", "va", swapped)]})
    nothing_trained(path, outcome, "Another client shows a card in the name of 'va'")


# --- keys that are replaced while a run waits


def halfway(path, places):
    """The first round of a run, and the model that it would reach if nothing were replaced."""
    whole = path.with_name("whole.toml")
    whole.write_text(
        path.read_text().replace("rounds = 500", "rounds = 2").replace('"run"', '"whole"')
    )
    run(whole, places)
    path.write_text(path.read_text().replace("rounds = 500", "rounds = 1"))
    assert run(path, places)[0].rounds == 1
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 2"))
    return model_of(whole)


def test_a_silo_s_own_key_is_replaced_and_the_run_goes_on_with_the_same_numbers(tmp_path):
    path, places = secured(tmp_path)
    x = halfway(path, places)
    before = shown(places["va"])
    (places["va"].parent / "identity.key").unlink()
    outcome, transport = run(path, places)
    assert (outcome.rounds, shown(places["va"]) == before) == (2, False)
    np.testing.assert_allclose(model_of(path), x, rtol=1e-10, atol=1e-12)
    assert leaks(transport.log) == []


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_key_that_is_pinned_is_replaced_where_the_others_pin_the_new_one_first(
    tmp_path, pinned_first
):
    path, places = secured(tmp_path, rules=REQUIRED)
    x = halfway(path, places)
    old = shown(places["va"])
    (places["va"].parent / "identity.key").unlink()
    for place in places.values() if pinned_first else ():
        place.write_text(place.read_text().replace(old, shown(places["va"])))
    outcome, _ = run(path, places)
    if pinned_first:
        assert outcome.rounds == 2
        np.testing.assert_allclose(model_of(path), x, rtol=1e-10, atol=1e-12)
    else:
        assert outcome.rounds == 1
        found = next(event["sentence"] for event in events(path) if event["what"] == "quarantined")
        assert "The key of 'va' is not the one that is pinned here" in found


@pytest.mark.parametrize("all_of_them", [True, False])
def test_kits_are_provisioned_anew(tmp_path, all_of_them):
    """Certificates and their authority may change between two jobs of a run, all at once."""
    path, places = certified(tmp_path)
    # in the place of the old one
    x = halfway(path, places)
    office = Office(tmp_path / "office")
    for name, place in places.items():
        if all_of_them or name != "va":
            office.issue(name, place.parent)
    outcome, _ = run(path, places)
    if all_of_them:
        assert outcome.rounds == 2
        np.testing.assert_allclose(model_of(path), x, rtol=1e-10, atol=1e-12)
    else:
        assert outcome.rounds == 1
        assert "not signed by a site that this authority knows" in " ".join(
            [outcome.sentence, *(event["sentence"] for event in events(path))]
        )
