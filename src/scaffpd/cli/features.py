"""`scaffpd features`: images as rows of numbers for linear models, computed once and kept in a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from scaffpd.cli import typer_ext
from scaffpd.cli.typer_ext import argument, checked, option, prepare, print_json
from scaffpd.errors import InputError


def features(
    dataset: Annotated[str, argument("cifar10, cifar100 or tiny-imagenet.", typer_ext.IMAGES)],
    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets and weights.", show_default="SCAFFPD_DATA")
    ] = None,
    backbone: Annotated[
        str, option("efficientnet-lite0 or resnet18-layer3.", typer_ext.BACKBONES)
    ] = "efficientnet-lite0",
    kind: Annotated[str, option("entk: gradients; penultimate: last features.", typer_ext.KINDS)] = "entk",
    coordinates: Annotated[int, typer.Option(min=1, help="Coordinates of the gradient that are kept.")] = 50_000,
    size: Annotated[int, typer.Option(min=8, help="Pixels a side to which images are resized.")] = 224,
    device: Annotated[str, option("auto, cpu or cuda.", typer_ext.DEVICES)] = "auto",
    dtype: Annotated[str, option("Format of storage: float16 or float32.", typer_ext.DTYPES)] = "float16",
    precision: Annotated[
        str | None,
        option("float32, tf32 or bfloat16.", typer_ext.PRECISIONS, "tf32 on a GPU, else float32"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="For a chunk: 4GB.", show_default="a share of the free")] = None,
    cache: Annotated[Path, typer.Option("--cache", "--out", help="Folder for tables.")] = Path("features"),
    images_per_class: Annotated[
        int | None, typer.Option(min=1, help="Of training and test images each.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random head and the coordinates.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksums of a table once more.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the table and print nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON, and nothing else.")] = False,
) -> None:
    """Images as rows of numbers for linear models; the same command again goes on or finds it done.

    Images and weights are yours to provide: scaffpd data says where.

    Examples:
        scaffpd features cifar10 --data ~/data --images-per-class 5 --size 64
    """
    for what, given, names in (
        ("dataset", dataset, typer_ext.IMAGES), ("backbone", backbone, typer_ext.BACKBONES),
        ("kind", kind, typer_ext.KINDS), ("dtype", dtype, typer_ext.DTYPES),
        ("precision", precision or "float32", typer_ext.PRECISIONS),
    ):  # fmt: skip
        checked(what, given, names)
    from scaffpd import data as sources  # seconds, so not for --help
    from scaffpd.features import backbone as known
    from scaffpd.features import features as extract
    from scaffpd.features.extract import place
    from scaffpd.features.store import parse_memory

    parse_memory(memory)
    where = place(device)
    exact = precision or ("tf32" if where.type == "cuda" else "float32")  # as `python -m experiments.reproduce` has it
    network = known(backbone, data, size)
    images = getattr(sources, typer_ext.IMAGES[dataset])(data)
    if images_per_class is not None:
        images = images.subset(images_per_class, images_per_class)
    prepare(cache)
    if not (quiet or as_json):
        counts = f"{len(images.train.x)} training and {len(images.test.x)} test images"
        shape = " × ".join(map(str, images.train.x.shape[1:3]))
        typer.echo(f"{images.name}: {counts} of {shape} pixels; {network.name} at {network.size} × {network.size}.")
    started, there = time.perf_counter(), {path.name for path in cache.glob("*") if (path / "meta.json").exists()}
    try:
        table = extract(
            images, network, kind, coordinates, seed, memory=memory, device=where, dtype=dtype, precision=exact,
            cache=cache, progress=False if quiet else None, verify=verify or None,
        )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("Interrupted: the same command goes on from here.", err=True)
        raise
    if as_json:
        print_json({"folder": cache / table.key, **_meta(cache / table.key)})
    elif not quiet:
        _say_done(table, cache / table.key, time.perf_counter() - started, there, coordinates)


def _say_done(table: Any, folder: Path, seconds: float, there: set[str], wanted: int) -> None:
    from scaffpd.system import format_bytes

    meta = _meta(folder)
    rows, columns = table.values.shape
    rate = meta["samples_per_second"]
    pace = "" if rate is None else f" at {rate:.3g} images/s on {meta['device']}"
    cached = folder.name in there
    how = f"found in the cache, computed earlier{pace}" if cached else f"computed{pace} in {seconds:.1f} s"
    if meta["kind"] == "entk" and columns < wanted:
        typer.echo(f"The network has {columns:,} coordinates; all are taken.")
    typer.echo(f"{rows} × {columns} in {meta['dtype']} ({format_bytes(table.values.nbytes)}), {how}.")
    typer.echo(str(folder))


def _meta(folder: Path) -> dict[str, Any]:
    """What the table says about itself."""
    import json

    try:
        found: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"The table in {str(folder)!r} disappeared while it was read.") from None
    return found
