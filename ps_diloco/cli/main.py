"""``ps-diloco``: the command line, and the only place where workers, aggregator and library meet in one process.

Exit codes: 0 done; 2 the input has to be corrected; 3 the store; 4 fenced by a newer process; 5 damaged data; 70 a bug; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

import typer

from ps_diloco import __version__
from ps_diloco.cli import aggregate, demo, export, init, status, unit, versions
from ps_diloco.cli.context import Context
from ps_diloco.errors import PsDilocoError
from ps_diloco.store import S3Settings

app = typer.Typer(
    name="ps-diloco",
    help="Train one model on GPUs scattered over regions and clouds, with nothing between them but a bucket.",
    epilog="RUN is the URL of a run: s3://bucket/prefix, gs://bucket/prefix, file:///path, or a plain path. S3 credentials, region and endpoint come "
    "from the usual AWS environment variables and files (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL_S3), those of GCS from Google's "
    "(gcloud auth application-default login, GOOGLE_APPLICATION_CREDENTIALS, STORAGE_EMULATOR_HOST).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (demo.demo, init.init, unit.unit, aggregate.aggregate, status.status, versions.versions, export.export):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ps-diloco {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    endpoint_url: Annotated[str | None, typer.Option(help="S3 server other than AWS.")] = None,
    s3_region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
    s3_profile: Annotated[str | None, typer.Option(help="AWS profile.")] = None,
    s3_checksum: Annotated[
        Literal["when_supported", "when_required"] | None,
        typer.Option(help="when_required for servers that refuse the SDK's default checksums."),
    ] = None,
    trust_exclusive_create: Annotated[
        bool,
        typer.Option(
            "--trust-exclusive-create", help="For fsspec+...:// only: you know that one only of concurrent creates succeeds there."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens in the background.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("botocore", "boto3", "urllib3", "asyncio", "fsspec", "google"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    context.obj = Context(
        s3=S3Settings(endpoint_url=endpoint_url, region=s3_region, profile=s3_profile, checksum=s3_checksum),
        trust_exclusive_create=trust_exclusive_create,
    )


def run() -> None:
    """Entry point of the ``ps-diloco`` script."""
    try:
        app()
    except PsDilocoError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    run()
