"""`torchferry serve` and `torchferry fetch`: files, addresses, tokens, errors, signals."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import torchferry
from tests.support import processes
from tests.support.equality import assert_same
from torchferry import cli

TOKEN = "a-secret-of-the-tests-0123456789"
STATE = {"weight": torch.arange(300.0).reshape(20, 15), "bias": torch.ones(7, dtype=torch.bfloat16)}

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHFERRY_TOKEN", "TORCHFERRY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Invoke]:
    """A function that runs `torchferry` in this process, and returns its exit code, stdout and stderr."""
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["torchferry", *map(str, arguments)])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert isinstance(raised.value.code, int)
        return raised.value.code, *capfd.readouterr()

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture
def source() -> Iterator[torchferry.Source]:
    with torchferry.serve(STATE, version=7, token=TOKEN) as source:
        yield source


def without_token(source: torchferry.Source) -> str:
    return source.address.partition("/#")[0]


@contextmanager
def command(*arguments: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start `torchferry` as a process, which has ended after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchferry", *map(str, arguments)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def stalling_proxy(port: int, after_bytes: int) -> Iterator[tuple[int, threading.Event]]:
    """Forward connections to a port until `after_bytes` bytes were answered; yield the proxy's port.

    The event is set when it stalls. Connections stay open until the end of the block.
    """
    stalled = threading.Event()
    left = [after_bytes]
    sockets = [socket.create_server(("127.0.0.1", 0))]

    def forward(begin: socket.socket, end: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while not stalled.is_set() and (data := begin.recv(65536)):
                end.sendall(data)
                left[0] -= len(data) * is_answer
                if left[0] <= 0:
                    stalled.set()

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, far = sockets[0].accept()[0], socket.create_connection(("127.0.0.1", port))
                sockets.extend((near, far))
                for ends in ((near, far, False), (far, near, True)):
                    threads.append(threading.Thread(target=forward, args=ends))
                    threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield sockets[0].getsockname()[1], stalled
    finally:
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in sockets:
            sock.close()


class TestServeAndFetch:
    def test_copy_a_file_through_an_address_file_and_end_with_0_on_sigterm(
        self, tmp_path: Path, invoke: Invoke
    ) -> None:
        saved, address, copy = tmp_path / "saved.pt", tmp_path / "address", tmp_path / "copy.pt"
        torch.save(STATE, saved)
        address.touch(0o644)  # an old file, which others may read
        with command("serve", saved, "--version", "7", "--address-file", address) as server:
            assert server.stdout is not None
            printed = server.stdout.readline().strip()
            assert (address.stat().st_mode & 0o777) == 0o600
            assert address.read_text().startswith(f"{printed}/#")
            saved.unlink()
            code, out, err = invoke("fetch", "--address-file", address, "-o", copy)
            assert (code, err) == (0, "")
            assert "copy.pt: version 7: 1,214 of 1,214 bytes moved" in out
            server.send_signal(signal.SIGTERM)
            assert server.communicate(timeout=10) == ("", "")
            assert server.returncode == 0
        assert_same(torch.load(copy), STATE)
        assert sorted(tmp_path.iterdir()) == [address, copy]

    @pytest.mark.slow
    def test_the_printed_address_is_all_that_fetch_needs_and_ctrl_c_ends_serve_with_0(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.save(STATE, tmp_path / "saved.pt")
        with command("serve", tmp_path / "saved.pt", "--name", "ema") as server:
            assert server.stdout is not None
            monkeypatch.setenv("TORCHFERRY_ADDRESS", server.stdout.readline().strip())
            code, _, err = invoke("fetch", "--name", "ema", "-o", tmp_path / "copy.pt")
            assert (code, err) == (0, "")
            server.send_signal(signal.SIGINT)
            assert server.communicate(timeout=10) == ("", "")
            assert server.returncode == 0
        assert_same(torch.load(tmp_path / "copy.pt"), STATE)

    @pytest.mark.slow
    def test_serve_takes_its_token_from_a_file_and_does_not_print_it(
        self, tmp_path: Path, invoke: Invoke
    ) -> None:
        torch.save(STATE, tmp_path / "saved.pt", _use_new_zipfile_serialization=False)
        token = tmp_path / "token"
        token.write_text(f"{TOKEN}\n")
        with command("serve", tmp_path / "saved.pt", "--token-file", token) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert TOKEN not in address
            code, _, err = invoke("fetch", address, "--token-file", token, "-o", tmp_path / "copy.pt")
            assert (code, err) == (0, "")
        assert_same(torch.load(tmp_path / "copy.pt"), STATE)

    @pytest.mark.slow
    def test_safetensors_files_are_served_and_written(self, tmp_path: Path, invoke: Invoke) -> None:
        saved, copy, address = tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "address"
        safetensors.torch.save_file(STATE, saved)
        with command("serve", saved, "--address-file", address) as server:
            assert server.stdout is not None
            server.stdout.readline()
            code, _, err = invoke("fetch", "--address-file", address, "-o", copy)
            assert (code, err) == (0, "")
        found = safetensors.torch.load_file(copy)
        assert_same({name: found[name] for name in STATE}, STATE)

    @pytest.mark.slow
    def test_a_terminal_shows_a_progress_bar_on_stderr_only(
        self, tmp_path: Path, source: torchferry.Source
    ) -> None:
        near, far = pty.openpty()
        env = {**os.environ, "TORCHFERRY_ADDRESS": source.address, "TERM": "xterm"}
        with command("fetch", "-o", tmp_path / "copy.pt", stderr=far, env=env) as receiver:
            os.close(far)
            shown = b""
            with suppress(OSError):  # raised when the other end of the terminal is closed
                while data := os.read(near, 65536):
                    shown += data
            os.close(near)
            out, _ = receiver.communicate(timeout=60)
        assert receiver.returncode == 0
        assert "━".encode() in shown
        assert "━" not in out
        assert out.count("\n") == 1


class TestFetch:
    def test_reads_several_addresses_and_reports_each(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_TOKEN", TOKEN)
        with torchferry.serve(STATE, version=7, token=TOKEN) as second:
            given = [without_token(each) for each in (source, second)]
            code, out, err = invoke("fetch", *given, "-o", tmp_path / "copy.pt")
        assert (code, err) == (0, "")
        assert all(address.removeprefix("http://") in out for address in given)
        assert_same(torch.load(tmp_path / "copy.pt"), STATE)

    def test_accepts_addresses_with_and_without_a_token_in_a_file(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        file = tmp_path / "addresses"
        with torchferry.serve(STATE, version=7) as second:
            file.write_text(f"{without_token(source)}/\n{second.address}\n")
            monkeypatch.setenv("TORCHFERRY_TOKEN", TOKEN)
            code, out, err = invoke("fetch", "--address-file", file, "-o", tmp_path / "copy.pt")
        assert (code, err) == (0, "")
        assert str(second).removeprefix("Source(").removesuffix(")") in out

    def test_overwrites_a_file_and_keeps_the_usual_permissions(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
        copy, usual = tmp_path / "copy.pt", tmp_path / "usual"
        copy.write_text("old")
        usual.touch()
        code, _, err = invoke("fetch", "--no-verify", "--version", "7", "-o", copy)
        assert (code, err) == (0, "")
        assert_same(torch.load(copy), STATE)
        assert copy.stat().st_mode == usual.stat().st_mode
        assert sorted(tmp_path.iterdir()) == [copy, usual]

    def test_explains_a_state_that_a_safetensors_file_can_not_hold(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchferry.serve({"step": 3}, version=0) as source:
            monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
            code, out, err = invoke("fetch", "-o", tmp_path / "copy.safetensors")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "copy.safetensors: Key `step` is invalid" in err
        assert list(tmp_path.iterdir()) == []

    def test_names_the_package_that_safetensors_files_need(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
        code, out, err = invoke("fetch", "-o", tmp_path / "copy.safetensors")
        assert (code, out) == (1, "")
        assert err == "torchferry: .safetensors files need a package: pip install safetensors\n"
        assert source.status().readers == ()


class TestAnError:
    """An error is one line on stderr, without a traceback or the token, and leaves the output as it was."""

    @pytest.mark.parametrize(
        ("options", "environment", "message"),
        [
            (["--version", "8"], {}, "the source has version 7 of 'state', not version 8"),
            (["--name", "ema"], {}, "the source has no 'ema'; it serves 'state'"),
            (["--token-file", "missing"], {}, "No such file or directory: 'missing'"),
            (["{bare}"], {"TORCHFERRY_TOKEN": "b" * 32}, "the source does not accept the token"),
        ],
    )
    def test_of_a_fetch_ends_it_with_1(
        self,
        tmp_path: Path,
        invoke: Invoke,
        monkeypatch: pytest.MonkeyPatch,
        source: torchferry.Source,
        options: Sequence[str],
        environment: dict[str, str],
        message: str,
    ) -> None:
        for name, value in {"TORCHFERRY_ADDRESS": source.address, **environment}.items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / "copy.pt"
        copy.write_text("old")
        options = [option.format(bare=without_token(source)) for option in options]
        code, out, err = invoke("fetch", *options, "-o", copy)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
        assert TOKEN not in err
        assert (copy.read_text(), [*tmp_path.iterdir()]) == ("old", [copy])

    def test_a_source_that_is_gone_ends_a_fetch_with_1_and_is_named(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
        source.close()
        code, out, err = invoke("fetch", "-o", tmp_path / "copy.pt")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert without_token(source).removeprefix("http://") in err
        assert "Connection refused" in err
        assert TOKEN not in err

    def test_a_source_that_closes_the_connection_ends_a_fetch_with_1_and_is_named(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv("TORCHFERRY_ADDRESS", f"http://{where}/#{TOKEN}")

            def hang_up() -> None:
                with listener.accept()[0] as connection:
                    connection.recv(65536)

            thread = threading.Thread(target=hang_up)
            thread.start()
            code, out, err = invoke("fetch", "-o", tmp_path / "copy.pt")
            thread.join()
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{where}: the source closed the connection" in err

    @pytest.mark.parametrize("folder", ["missing", "file"])
    def test_an_output_that_can_not_be_written_is_found_before_the_transfer(
        self,
        tmp_path: Path,
        invoke: Invoke,
        monkeypatch: pytest.MonkeyPatch,
        source: torchferry.Source,
        folder: str,
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
        code, _, err = invoke("fetch", "-o", tmp_path / folder / "copy.pt")
        assert (code, err.count("\n")) == (1, 1)
        assert f"can't write {tmp_path / folder / 'copy.pt'}" in err
        assert source.status().readers == ()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file or directory"),
            (b"junk", ""),
            (b"", "EOFError"),
            ({"a": print}, "Unsupported global"),
        ],
    )
    def test_a_file_that_is_no_state_ends_serve_with_1(
        self, tmp_path: Path, invoke: Invoke, content: Any, message: str
    ) -> None:
        file = tmp_path / "saved.pt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is not None:
            torch.save(content, file)
        code, out, err = invoke("serve", file)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"torchferry: can't read {file}: " in err
        assert message in err

    def test_a_port_in_use_ends_serve_with_1(
        self, tmp_path: Path, invoke: Invoke, source: torchferry.Source
    ) -> None:
        torch.save(STATE, tmp_path / "saved.pt")
        port = without_token(source).rpartition(":")[2]
        code, out, err = invoke("serve", tmp_path / "saved.pt", "--port", port)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"port {port}: Address already in use" in err


class TestAWrongCommandLine:
    """It ends the command with 2, before anything is connected or written."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["fetch", "http://127.0.0.1:1"], "Missing option '--output'"),
            (["fetch", "-o", "copy.pt"], "no address: pass ADDRESS or --address-file"),
            (["fetch", "http://127.0.0.1:1", "-o", "copy.pt"], "no token: pass --token-file, or set"),
            (["fetch", "http://127.0.0.1:1", "-o", "copy.pt", "--timeout", "0"], "'--timeout'"),
            (["serve", "saved.npz"], "saved.npz must be a file that ends with .pt or .safetensors"),
            (["serve", "saved.pt", "--port", "70000"], "'--port'"),
        ],
    )
    def test_is_explained(self, invoke: Invoke, arguments: Sequence[str], message: str) -> None:
        code, out, err = invoke(*arguments)
        assert (code, out) == (2, "")
        assert message in " ".join(err.split())
        assert TOKEN not in err

    @pytest.mark.parametrize("option", ["--token-file", "--address-file"])
    def test_has_a_file_that_is_not_text(self, tmp_path: Path, invoke: Invoke, option: str) -> None:
        file = tmp_path / "random"
        file.write_bytes(bytes(range(224, 256)))
        code, _, err = invoke("fetch", "http://127.0.0.1:1", option, file, "-o", tmp_path / "copy.pt")
        assert (code, "no valid token" in err or "no token" in err) == (2, True)

    def test_has_a_token_that_others_can_see(
        self, tmp_path: Path, invoke: Invoke, source: torchferry.Source
    ) -> None:
        code, _, err = invoke("fetch", source.address, "-o", tmp_path / "copy.pt")
        assert code == 0
        assert "other users can see the token" in err
        assert source.address.partition("#")[2] not in err

    @pytest.mark.parametrize("address", ["127.0.0.1:1", "http://127.0.0.1", f"http://{TOKEN}@127.0.0.1:1"])
    def test_has_an_address_that_is_none(
        self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, address: str
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_TOKEN", TOKEN)
        code, out, err = invoke("fetch", address, "-o", "copy.pt")
        assert (code, out) == (2, "")
        assert "not the address of a source" in err
        assert TOKEN not in err

    def test_has_an_output_of_no_known_format(
        self, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, source: torchferry.Source
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_ADDRESS", source.address)
        (tmp_path / "folder.pt").mkdir()
        for name in ("copy", "copy.safetensor", "folder.pt"):
            code, _, err = invoke("fetch", "-o", tmp_path / name)
            assert code == 2
            assert f"{name} must be a file that ends with .pt or .safetensors" in " ".join(err.split())
        assert source.status().readers == ()

    @pytest.mark.parametrize("name", ["serve", "fetch"])
    def test_is_helped_without_showing_the_token(
        self, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv("TORCHFERRY_TOKEN", TOKEN)
        monkeypatch.setenv("TORCHFERRY_ADDRESS", f"http://127.0.0.1:1/#{TOKEN}")
        code, out, err = invoke(name, "--help")
        assert (code, err) == (0, "")
        assert "TORCHFERRY_TOKEN" in out
        assert TOKEN not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_fetch_that_is_ended_half_way_shows_no_token_and_leaves_no_file(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    copy = tmp_path / "copy.pt"
    copy.write_text("old")
    with torchferry.serve(torch.zeros(4 << 20), version=7, token=TOKEN) as source:
        port = int(without_token(source).rpartition(":")[2])
        with stalling_proxy(port, after_bytes=8 << 20) as (proxy, stalled):
            env = {**os.environ, "TORCHFERRY_TOKEN": TOKEN}
            with command("fetch", f"http://127.0.0.1:{proxy}", "-o", copy, env=env) as receiver:
                assert stalled.wait(60)
                (reader,) = source.status().readers
                assert reader.state == "reading"
                running = processes.ours(os.environ[processes.MARK])
                assert receiver.pid in [process.pid for process in running]
                assert not [process for process in running if TOKEN in process.command]
                receiver.send_signal(number)
                out, err = receiver.communicate(timeout=10)
    assert receiver.returncode == code
    assert (out, err) == ("", "")
    assert (copy.read_text(), [*tmp_path.iterdir()]) == ("old", [copy])
