"""Records of runs, made by hand: small numbers that a test can check in its head."""

from scaffpd.report.record import ClientScore, ModelRecord, Overall, RoundRecord, RunRecord


def model(name, scores, *, role="", upwards=True, rows=50, **more):
    clients = [
        ClientScore(
            client=client,
            weight=1 / len(scores),
            train_rows=100,
            test_rows=rows,
            test_score=value,
        )
        for client, value in scores.items()
    ]
    return ModelRecord(
        name=name,
        role=role,
        overall=Overall.of(scores, upwards),
        clients=clients,
        **{"status": "converged", "certificate": 1e-7, "rounds": 3} | more,
    )


def rounds(*certificates, losses=(0.5, 0.4), weights=(0.5, 0.5)):
    return [
        RoundRecord(round=k, certificate=gap, exchanges=k, losses=losses, weights=weights)
        for k, gap in enumerate(certificates)
    ]


def record(*models, kind="train", measure="accuracy", **more):
    """A run of these models; two of three clients gain where none are given."""
    if not models:
        before = {"A": 0.9, "B": 0.7, "C": 0.5}
        after = {"A": 0.88, "B": 0.75, "C": 0.6}
        models = (model("average", before, role="before"), model("fair", after, role="after"))
    clients = [score.client for score in models[0].clients]
    about = {"title": "a run", "split": "test", "clients": clients}
    return RunRecord(kind=kind, measure=measure, models=models, **about | more)
