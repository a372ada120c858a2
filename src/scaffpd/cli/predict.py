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

    Missing values are filled client by client from the rows at hand; the target column need not be there.

    Examples:
        scaffpd predict runs/patients new-patients.csv
    """
    import csv

    from scaffpd.runs.predict import predict as answer

    found = answer(run, table)
    probability = ["" if p != p else f"{p:.6f}" for p in found.probability]
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["client", "predicted", "probability"])
            writer.writerows(zip(found.clients, found.predicted, probability, strict=True))
    except OSError as error:
        raise InputError(f"Cannot write {str(out)!r}: {error.strerror}.") from None
    typer.echo(f"{len(found.predicted)} rows written to {out}.")
