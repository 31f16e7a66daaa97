"""``penstock cache``: what ``compile(cache=True)`` keeps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from penstock.cli.base import command, show_table
from penstock.core.types import JsonObject
from penstock.ir.describe import format_bytes
from penstock.session import compile_cache

FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder that was given as cache=. Default: the user's.",
)


def _show_cache(result: JsonObject) -> None:
    if "freed" in result:
        click.echo(f"{result['folder']}: {format_bytes(result['freed'])} freed")
        return
    rows = [(e["file"], format_bytes(e["bytes"]), e["used"]) for e in result["sessions"]]
    click.echo(f"{result['folder']}: {format_bytes(sum(e['bytes'] for e in result['sessions']))}")
    if rows:
        show_table(("session", "size", "last used"), rows)


@command(_show_cache)
@click.argument("action", type=click.Choice(["list", "clear"]))
@FOLDER
def cache(action: str, folder: Path | None) -> JsonObject:
    """List the sessions that compile(cache=...) keeps, or remove them."""
    chosen = compile_cache.folder_of(folder)
    if not chosen:
        raise click.UsageError("PENSTOCK_CACHE=off keeps nothing; name a folder by --folder")
    if action == "clear":
        return {"folder": str(chosen), "freed": compile_cache.clear(chosen)}
    sessions = [
        {
            "file": name,
            "bytes": status.st_size,
            "used": datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds"),
        }
        for name, status in compile_cache.entries(chosen)
    ]
    return {"folder": str(chosen), "sessions": sessions}
