"""The `torchferry` command: serves a state from a file, and fetches one into a file.

The library does not import this module, so programs that use only the library never load typer.
"""

import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any

import torch
import typer

from torchferry import __version__
from torchferry.core.text import show_text
from torchferry.engine.pull.caller import ProgressEvent
from torchferry.errors import BadArgument, FerryError, NotAuthorized, StateError
from torchferry.fetching import fetch
from torchferry.links.address import parse_address
from torchferry.serving import serve

_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}

_TokenFile = Annotated[Path | None, typer.Option(help="Read the token from this file.")]
_Name = Annotated[str, typer.Option(help="The name of the state at the source.")]


def main() -> None:
    """Run the command line, the entry point of the console script; always raises SystemExit."""
    # rich_markup_mode=None, because the help that typer formats with rich shows `<bool>` after a flag.
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)
    app.callback()(_torchferry)
    app.command("serve")(_serve)
    app.command("fetch")(_fetch)
    # Without arguments, print the help and exit with 0. typer's no_args_is_help exits with 2.
    app(sys.argv[1:] or ["--help"], prog_name="torchferry")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchferry {__version__}")
        raise typer.Exit


def _torchferry(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Moves live PyTorch state from the processes that have it to the processes that need it."""


def _serve(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="A .pt or .safetensors file.")],
    version: Annotated[int, typer.Option(help="The version of the state, such as its step.")] = 0,
    name: _Name = "state",
    host: Annotated[str, typer.Option(help="The address, name or interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 0,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="What receivers connect to, behind NAT.")
    ] = None,
    token_file: _TokenFile = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Write the address with its token here, readable only by you.")
    ] = None,
) -> None:
    """Serve the state in a file until Ctrl-C or SIGTERM, and print its address.

    The state is copied to memory, so the file may change. The token is that of --token-file, or else of the
    environment variable TORCHFERRY_TOKEN, or else a new random one. A new token is printed as a part of the
    address, unless --address-file is given. Whoever has the token can read the state.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _errors_on_one_line():
        token, content = _token(token_file), _load(state, _safetensors_for(state))
        with serve(
            content, version, name=name, host=host, port=port, advertise=advertise, token=token
        ) as source:
            del content
            if address_file is not None:
                with _replacing(address_file) as partial:
                    partial.touch(0o600)
                    partial.write_text(f"{source.address}\n")
            is_shown = token is None and address_file is None
            with suppress(KeyboardInterrupt):
                print(source.address if is_shown else source.address.partition("/#")[0], flush=True)
                # A signal that comes just before a sleep is handled after it.
                while True:
                    time.sleep(0.5)


def _fetch(
    output: Annotated[Path, typer.Option("--output", "-o", help="The .pt or .safetensors file to write.")],
    address: Annotated[
        list[str] | None, typer.Argument(metavar="ADDRESS", help="http://HOST:PORT, without the token.")
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(help="Read addresses, with or without a token, from this file.")
    ] = None,
    token_file: _TokenFile = None,
    name: _Name = "state",
    version: Annotated[int | None, typer.Option(help="Fetch exactly this version.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="The time limit in seconds.")] = 300.0,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Verify every byte.")] = True,
) -> None:
    """Fetch a state into a file, from one source or from several that serve the same state.

    Every user of the machine sees the arguments of processes, so do not put a token there. Put the address
    in the environment variable TORCHFERRY_ADDRESS or in --address-file. Or give http://HOST:PORT, and the
    token in TORCHFERRY_TOKEN or --token-file. The output is replaced only when the state is complete.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _errors_on_one_line():
        found = _addresses(address or [], address_file, _token(token_file))
        safetensors = _safetensors_for(output)
        failure = f"can't write {output}"
        with _explained(failure):
            TemporaryFile(dir=output.parent).close()  # find out before the transfer
        with _progress() as show:
            got = fetch(found, name=name, version=version, timeout=timeout, verify=verify, on_progress=show)
        with _explained(failure), _replacing(output) as partial:
            if safetensors is None:
                torch.save(got.state, partial)
            else:
                safetensors.save_file(got.state, partial, metadata={"format": "pt"})
        print(f"{output}: {got.report}")


@contextmanager
def _errors_on_one_line() -> Iterator[None]:
    try:
        yield
    except (FerryError, OSError) as error:
        typer.echo(f"torchferry: {show_text(str(error))}", err=True)
        raise typer.Exit(1) from None


def _token(file: Path | None) -> str | None:
    return (os.environ.get("TORCHFERRY_TOKEN") or None) if file is None else _read(file).strip()


def _read(file: Path) -> str:
    # A file that is not text has no valid token or address, which is told without showing it.
    return file.read_text(errors="replace")


def _addresses(arguments: Sequence[str], file: Path | None, token: str | None) -> list[str]:
    """Return all addresses, each with a token. Messages do not show them: they may have tokens."""
    if any("#" in argument for argument in arguments):
        typer.echo(
            "torchferry: warning: other users can see the token in the list of processes. Put the address in "
            "TORCHFERRY_ADDRESS or --address-file",
            err=True,
        )
    found = [*arguments, *(_read(file).split() if file is not None else [])]
    found = found or os.environ.get("TORCHFERRY_ADDRESS", "").split()
    if not found:
        raise typer.BadParameter("no address: pass ADDRESS or --address-file, or set TORCHFERRY_ADDRESS")
    if token is None and not all("#" in address for address in found):
        raise typer.BadParameter("no token: pass --token-file, or set TORCHFERRY_TOKEN")
    found = [each if "#" in each else f"{each.removesuffix('/')}/#{token}" for each in found]
    try:
        return [parse_address(address).url for address in found]
    except (BadArgument, NotAuthorized) as error:
        raise typer.BadParameter(error.what) from None


def _safetensors_for(file: Path) -> Any:
    """Return the module that reads and writes a file if it is a .safetensors file, or None for torch."""
    if file.suffix not in _SUFFIXES or file.is_dir():
        raise typer.BadParameter(f"{file} must be a file that ends with .pt or .safetensors")
    if file.suffix != ".safetensors":
        return None
    try:
        import safetensors.torch
    except ImportError:
        raise StateError(".safetensors files need a package: pip install safetensors") from None
    return safetensors.torch


def _load(file: Path, safetensors: Any) -> Any:
    with _explained(f"can't read {file}"):
        if safetensors is not None:
            return safetensors.load_file(file)
        # With mmap, `serve` makes the only copy in memory. Files of old formats can't be mapped.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


@contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Raise StateError for the many types that torch and safetensors raise."""
    try:
        yield
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = text.partition("WeightsUnpickler error: ")[2] or text
        raise StateError(f"{failure}: {show_text(reason, 300)}") from None


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to. What is there takes the place of `file` at the end, if nothing failed."""
    with TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder:
        partial = Path(folder, file.name)
        yield partial
        os.replace(partial, file)


@contextmanager
def _progress() -> Iterator[Callable[[ProgressEvent], object] | None]:
    """Show a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("connect", total=None)
        yield lambda event: progress.update(
            task, description=event.phase, completed=event.bytes_moved, total=event.bytes_total or None
        )
