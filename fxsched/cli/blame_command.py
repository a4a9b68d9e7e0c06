"""The command that reads the records of failed ranks."""

from __future__ import annotations

from pathlib import Path

import click

from ..runtime.blame import blame as blamed
from ..runtime.record import read_records


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def blame(folder: Path) -> None:
    """Print which rank failed or went silent first, and whom the others waited for.

    FOLDER is a folder with the files that backend(flight_record=FOLDER) wrote, of all
    ranks.
    """
    click.echo(blamed(read_records(folder)))
