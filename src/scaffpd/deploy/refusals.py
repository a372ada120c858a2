"""What a silo answers in place of a reason: a code, and a sentence that is the same everywhere.

The reason itself may have a path, a limit or a name of this silo's file in it, and is for the log.
Whoever asks, before anybody here has agreed to anything, learns which of these cases it is.
"""

from __future__ import annotations

from scaffpd.errors import InputError

TABLE_BUSY = "table-busy"
CANNOT = "silo-cannot"
AWAITED = "agreement-awaited"
UNUSABLE = "agreement-unusable"
WAITS = (AWAITED, TABLE_BUSY)  # what time may change
OF_DOCUMENTS = (  # codes of documents that cannot be read; all others are one
    "agreement-too-large",
    "colluding-out-of-range",
    "key-unreadable",
    "other-version",
    "too-few-to-hide",
)
PUBLIC = (  # codes of a run's refusals that are about what everybody sees
    TABLE_BUSY,
    "curvature-stays-at-silos",
    "ledger-changed",
    "ledger-went-back",
    "model-too-large",
    "points-too-near",
    "privacy-budget",  # the account counts releases, which are public
    "rows-changed",
    "share-too-large",
    "start-not-finite",
    "sum-impossible",
    "too-many-weightings",
)
SENTENCES = {
    CANNOT: "This silo cannot take part; its own log says why.",
    # of a message
    "not-a-message": "The silo cannot read this message.",
    "message-too-long": "The message is too long.",
    "too-many-arrays": "The message has too many arrays.",
    "too-many-values": "The message has too many values; an agreement has 65,536 bytes at most.",
    "other-protocol": "The silo has a scaffpd with another protocol: install the same everywhere.",
    "question-unknown": "This silo does not know this message.",
    # of a document
    UNUSABLE: "The silo cannot use this agreement; its own log says why.",
    "agreement-too-large": "The agreement has more than 65,536 bytes: declare fewer columns or "
    "categories.",
    "other-version": "The silo has another version of scaffpd: install the same one everywhere.",
    "key-unreadable": "The agreement has a key that is none.",
    "key-twice": "Two silos of the agreement have the same key.",
    "key-differs": "The agreement has a key for this silo that is not its own.",
    "too-few-to-hide": "There are too few silos in the agreement to hide one in a sum.",
    "colluding-out-of-range": "The agreement has too many colluding silos.",
    # of what this silo's file allows
    "member-unknown": "The agreement has a silo or a key that this silo's file does not have.",
    "run-without-noise": "This silo takes part only with differential privacy, and the "
    "agreement has no [privacy].",
    "epsilon-too-large": "The agreement may cost a larger ε than this silo's file allows.",
    "minibatch-too-small": "The agreement asks about fewer rows at a time than this silo's file "
    "allows.",
    "share-too-large": "One silo may have a larger share of a sum than this silo's file allows: "
    "use ChiSquare with a cap, or CVaR.",
    # of what its operator has decided
    AWAITED: "The operator of this silo has not agreed to this run yet.",
    "agreement-revoked": "The operator of this silo has withdrawn.",
    "too-many-waiting": "Too many agreements wait for the operator of this silo to decide.",
    "too-many-runs": "This silo has taken part in as many runs as its file allows.",
    "code-not-listed": "The agreement names a method, an objective or a model that is not the "
    "package's, and this silo's file does not list it.",
    # of a run
    TABLE_BUSY: "Another run uses this silo's rows: one at a time does.",
    "curvature-stays-at-silos": "How curved its loss is stays at every silo: agree on "
    "training.rate.",
    "ledger-changed": "The ledger of this silo's table was changed or removed: its operator has to "
    "bring back the newest copy.",
    "ledger-went-back": "The ledger of this silo's table lacks what the silo has noted of it: its "
    "operator has to bring back the newest copy, or, of a table in a new file, name the ledger's "
    "folder in data.ledger.",
    "model-too-large": "The exchanges of this model are too large: use a smaller one.",
    "points-too-near": "Weights that silos keep would be summed twice at points that count as one: "
    "agree on a larger training.tol, or a smaller distance.",
    "privacy-budget": "The privacy budget of this silo's rows does not allow this answer.",
    "rows-changed": "The rows of a silo are not those that this run began with: changed rows need "
    "a new agreement.",
    "start-not-finite": "A loss is not finite at the start, or the objective has no value there.",
    "sum-impossible": "A sum over all silos is one that no losses have: one of them does not keep "
    "to the protocol.",
    "too-many-weightings": "The rows of this silo would be summed with more weightings than are "
    "safe: go on with an objective that an earlier agreement had, or agree on [privacy].",
}


def refusal(code: str, kind: type[InputError] = InputError) -> InputError:
    """Return a refusal with its fixed sentence; of a code that has none, that of all others."""
    code = code if code in SENTENCES else CANNOT
    return kind(code, SENTENCES[code])
