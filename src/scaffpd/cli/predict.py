"""`scaffpd predict`: a trained model on new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scaffpd.errors import InputError


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or its model.safetensors.", show_default=False)],
    table: Annotated[Path, typer.Argument(help="Rows with the same columns: CSV or Parquet.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
) -> None:
    """Apply a trained model to new rows, in their order.

    Missing values are filled as in training, for new clients from the rows at hand; no target column is needed.

    Examples:
        scaffpd predict runs/patients new-patients.csv
    """
    import csv
    import io

    from scaffpd.checkpoint import replacing
    from scaffpd.runs.predict import predict as answer
    from scaffpd.runs.predict import promise

    if out.resolve() == table.resolve():
        raise InputError(f"{str(out)!r} is the table itself: choose another file with --out.")
    found, text = answer(run, table), io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["client", "predicted", "probability"])
    probability = ["" if p != p else f"{p:.6f}" for p in found.probability]
    writer.writerows(zip(found.clients, found.predicted, probability, strict=True))
    try:
        with replacing(out) as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise InputError(f"Cannot write {str(out)!r}: {error.strerror}.") from None
    typer.echo(f"{len(found.predicted)} rows written to {out}.")
    if (pair := promise(run)) is not None:
        typer.echo(f"The model was trained with {pair} for every record.")
