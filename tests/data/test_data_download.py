"""Downloads: mirrors in turn, nothing half-written, clear words offline. The only server is one of our own."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lipdp import data
from lipdp.data import files
from lipdp.data.files import RemoteFile, ensure
from lipdp.errors import DataError

BODY = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind = self.path.split("/")[1]
        if kind == "absent":
            self.send_error(404)
            return
        body = b"<html>sign in</html>" if kind == "portal" else BODY
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if kind == "cut" else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def test_mirrors_in_turn(tmp_path: Path, server: tuple[str, list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    url, asked = server
    path = tmp_path / "new" / "toy" / "a.gz"
    mirrors = tuple(f"{url}/{kind}/" for kind in ("absent", "portal", "cut", "good", "never"))
    ensure("toy", RemoteFile("a.gz", SHA256, mirrors), path, download=True)
    assert asked == ["/absent/a.gz", "/portal/a.gz", "/cut/a.gz", "/good/a.gz"]
    assert path.read_bytes() == BODY
    assert [file.name for file in path.parent.iterdir()] == ["a.gz"]
    assert capfd.readouterr() == ("", ""), "a library does not print"
    ensure("toy", RemoteFile("a.gz", SHA256, mirrors), path, download=True)
    assert len(asked) == 4, "what is on disk is not downloaded again"


def test_every_mirror_fails(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    url, _ = server
    path = tmp_path / "toy" / "a.gz"
    mirrors = tuple(f"{url}/{kind}/" for kind in ("absent", "portal", "cut"))
    with pytest.raises(DataError) as raised:
        ensure("toy", RemoteFile("a.gz", SHA256, mirrors), path, download=True)
    for part in (*mirrors, "404", "does not have the published sha256", str(path), "LIPDP_DATA", "root="):
        assert part in str(raised.value)
    assert list(path.parent.iterdir()) == []


def test_interrupted_download_leaves_nothing(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pooch

    class Interrupted(pooch.HTTPDownloader):  # type: ignore[misc]
        def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
            Path(output_file).write_bytes(BODY[:100])
            raise KeyboardInterrupt

    monkeypatch.setattr(pooch, "HTTPDownloader", Interrupted)
    path = tmp_path / "toy" / "a.gz"
    with pytest.raises(KeyboardInterrupt):
        ensure("toy", RemoteFile("a.gz", SHA256, (f"{server[0]}/good/",)), path, download=True)
    assert list(path.parent.iterdir()) == []


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(url: str, sha256: str, path: Path) -> None:
        tried.append(url)
        raise ConnectionError("Max retries exceeded (Caused by NameResolutionError('<address at 0x7f>'))")

    monkeypatch.setattr(files, "_retrieve", fail)
    for name in ("mnist", "fashion-mnist", "cifar10"):
        tried.clear()
        with pytest.raises(DataError) as raised:
            data.load(name, root=tmp_path)
        message = str(raised.value)
        place = tmp_path / name.replace("-", "_") / Path(tried[0]).name
        for part in (*tried, str(place), "LIPDP_DATA", "root=", "is there a network?"):
            assert part in message
        assert "0x7f" not in message
        assert not place.exists()


def test_refused_connection_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    with pytest.raises(DataError, match="could not be downloaded"):
        ensure("toy", RemoteFile("a.gz", SHA256, ("http://127.0.0.1:9/",) * 2), tmp_path / "a.gz", download=True)
    assert list(tmp_path.iterdir()) == []


def test_without_pooch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match="pip install pooch") as raised:
        data.load("mnist", root=tmp_path)
    assert str(tmp_path / "mnist" / "train-images-idx3-ubyte.gz") in str(raised.value)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "mnist").write_text("a file in the way")
    with pytest.raises(DataError, match="cannot be made"):
        data.load("mnist", root=tmp_path)


def test_progress_bar_on_a_terminal(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    path = tmp_path / "a.gz"
    ensure("toy", RemoteFile("a.gz", SHA256, (f"{server[0]}/absent/", f"{server[0]}/good/")), path, download=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "a.gz" in err
    assert path.read_bytes() == BODY


def test_no_bar_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with files.download_bar("a") as bar:
        assert bar is False
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with files.download_bar("a") as bar:
        assert bar is False
