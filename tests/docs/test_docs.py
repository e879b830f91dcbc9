"""Every example of README and docs runs, every link leads somewhere, and the page of errors names them all.

A page is executed as a reader would do it, from top to bottom, in an empty folder: its ``python`` blocks are one
program in one interpreter, which waits while the test runs the commands of its ``console`` blocks. What a page shows
below a command must be what the command prints, but for the width of blanks; ``...`` stands for any text or, alone on a
line, for any lines.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pillarbox import errors
from tests import commands
from tests.servers import DatabaseServer, Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(r"^( *)```(\S*)$")
COMMAND = re.compile(r"\$ ((?:[A-Z_]+=\S+ )*pillarbox .*)")
PROGRAM = re.compile(r"\$ python \w+\.py")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
LANGUAGES = {"python", "console", "text", "sh", "sql", "yaml", "json"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line on the page, and its lines."""

    language: str
    first: int
    lines: list[str]


@dataclass(frozen=True)
class Shown:
    """A command, and what the page shows below it."""

    line: int
    command: str
    output: list[str]


def blocks_of(page: Path) -> Iterator[Block]:
    opened: Block | None = None
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if opened is None and (fence := FENCE.match(line)):
            opened = Block(fence[2], number + 1, [])
        elif opened is not None and line.strip() == "```":
            yield opened
            opened = None
        elif opened is not None:
            opened.lines.append(line)
    if opened is not None:
        pytest.fail(f"{page.name}: the block at line {opened.first} is not closed")


def commands_of(block: Block) -> Iterator[Shown]:
    found: Shown | None = None
    for number, line in enumerate(block.lines, block.first):
        if line.startswith("$ "):
            if found:
                yield found
            found = Shown(number, line, [])
        else:
            assert found, f"line {number}: output without a command"
            found.output.append(line)
    if found:
        yield found


def script_of(page: Path) -> tuple[str, list[Shown]]:
    """The page as one program, line by line at the same place, so that a traceback names lines of the page."""
    lines = [""] * len(page.read_text("utf-8").splitlines())
    shown: list[Shown] = []
    for block in blocks_of(page):
        if block.language == "python":
            lines[block.first - 1 : block.first - 1 + len(block.lines)] = block.lines
        elif block.language == "console":
            for each in commands_of(block):
                lines[each.line - 1] = _call(each)
                shown.append(each)
    return "\n".join(lines), shown


def _call(shown: Shown) -> str:
    """The line that stands in the program for a command of the page: it leaves the output beside the folder."""
    if PROGRAM.fullmatch(shown.command):
        printed = "__import__('sys').stdout.flush() or __import__('pathlib').Path('../output').read_bytes()"
        return f"__import__('pathlib').Path('../output-{shown.line}').write_bytes({printed})"
    assert COMMAND.fullmatch(shown.command), (
        f"line {shown.line}: only pillarbox and the page's own program can be run: {shown.command}"
    )
    return f"__import__('os').write(0, b'{shown.line}\\n') and __import__('os').read(0, 1) or exit(1)"


def run_commands(asked: socket.socket, shown: Sequence[Shown], folder: Path, environment: Mapping[str, str]) -> None:
    """Run the commands that the program asks for by their lines, until it ends."""
    commands_at = {each.line: each.command for each in shown}
    with asked, asked.makefile() as lines:
        for line in map(int, lines):
            words = shlex.split(commands_at[line].removeprefix("$ "))
            start = words.index("pillarbox")
            variables = dict(word.split("=", 1) for word in words[:start])
            done = commands.run(words[start + 1 :], {**environment, **variables}, folder)
            assert (done.returncode, done.stderr) == (0, ""), commands_at[line]
            folder.with_name(f"output-{line}").write_text(done.stdout, "utf-8")
            asked.send(b".")


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are what the page shows."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(matches(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    pattern = ".*".join(re.escape(part) for part in " ".join(shown[0].split()).split("..."))
    return (
        bool(printed)
        and re.fullmatch(pattern, " ".join(printed[0].split())) is not None
        and matches(shown[1:], printed[1:])
    )


@pytest.fixture
def environment(use_server: Callable[[str], Server]) -> dict[str, str]:
    """As a newcomer has it: nothing is set, and the embedded server is empty."""
    server = use_server("embedded")
    assert isinstance(server, DatabaseServer)
    server.drop("pillarbox")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PILLARBOX_", "PYTHON"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PILLARBOX_HOME": os.environ["PILLARBOX_HOME"], "PATH": path}


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


WITH_EXAMPLES = [page for page in PAGES if {"python", "console"} & {block.language for block in blocks_of(page)}]


Start = Callable[[Path, Mapping[str, str], Path, socket.socket], Callable[[], int | None]]
"""Starts a program, with files beside its folder for what it says; what comes back waits for its end."""


def fork(program: Path, environment: Mapping[str, str], folder: Path, stdin: socket.socket) -> Callable[[], int | None]:
    out, err = folder.with_name("output"), folder.with_name("complaints")
    process = commands.start(program, environment, folder, stdin=stdin, out=out, err=err)

    def end() -> int | None:
        process.join(60)
        if process.exitcode is None:
            process.kill()
        return process.exitcode

    return end


def interpret(
    program: Path, environment: Mapping[str, str], folder: Path, stdin: socket.socket
) -> Callable[[], int | None]:
    with folder.with_name("output").open("wb") as out, folder.with_name("complaints").open("wb") as err:
        command = [sys.executable, "-W", "error", str(program)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=stdin.fileno(), stdout=out, stderr=err)
    return lambda: process.wait(60)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=names(WITH_EXAMPLES))
@pytest.mark.parametrize("start", [fork, pytest.param(interpret, marks=pytest.mark.full)])
def test_examples(page: Path, tmp_path: Path, environment: dict[str, str], start: Start) -> None:
    """In a process that has imported what most pages import, or in an interpreter that has imported nothing."""
    script, shown = script_of(page)
    program = tmp_path / f"{page.name}.py"
    program.write_text(script, "utf-8")
    folder = tmp_path / "empty"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with theirs:
        end = start(program, environment, folder, theirs)
    try:
        run_commands(ours, shown, folder, environment)
    finally:
        code = end()
    assert (code, (tmp_path / "complaints").read_text("utf-8")) == (0, "")
    for each in shown:
        printed = (tmp_path / f"output-{each.line}").read_text("utf-8").splitlines()
        if each.output and not matches(each.output, printed):
            pytest.fail("\n".join([f"{page.name}, line {each.line}: {each.command[2:]} prints", *printed]))


def test_the_service_of_the_readme_takes_orders(tmp_path: Path, environment: dict[str, str]) -> None:
    """The page only makes it; here is a client."""
    program = tmp_path / "service.py"
    blocks = [line for block in blocks_of(ROOT / "README.md") if block.language == "python" for line in block.lines]
    program.write_text(
        "\n".join(line for line in blocks if line != "asyncio.run(main())")
        + """


async def client() -> None:
    import httpx

    async with app.router.lifespan_context(app), httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        print((await http.post("/orders", params={"total_cents": 4200})).status_code)
        [message] = await broker.received("orders.order.events")
        print(message.headers["event_type"])


asyncio.run(client())
""",
        "utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.stdout.decode(), done.stderr.decode()) == ("201\norders.order.placed\n", "")


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_have_a_known_language(page: Path) -> None:
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


ALL = [*PAGES, *(page for page in sorted(ROOT.glob("*.md")) if page not in PAGES)]


@pytest.mark.parametrize("page", ALL, ids=names(ALL))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            file, _, heading = target.partition("#")
            found = page.parent / file if file else page
            assert found.exists(), target
            assert not heading or heading in anchors(found), target


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_page_can_be_found() -> None:
    """From the index, by following links."""
    reached, coming = set[Path](), [ROOT / "docs" / "index.md"]
    while coming:
        page = coming.pop()
        if page.suffix == ".md" and page not in reached and page.exists():
            reached.add(page)
            coming += [(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())]
    assert set(PAGES[1:]) <= reached


def test_the_page_of_errors_names_every_class() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    classes = [
        each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.PillarboxError)
    ]
    assert [each.__name__ for each in classes if f"`{each.__name__}`" not in page] == []


TEST = re.compile(r"`((?:tests|src)/[\w/]+\.py)((?:::\w+)*)`")


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, parts in TEST.findall(page.read_text("utf-8")):
        source = (ROOT / file).read_text("utf-8")
        for name in filter(None, parts.split("::")):
            assert re.search(rf"(?:class|def) {name}\b", source), f"{file}{parts}"


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a", "a", True),
        ("a", "a\nb", False),
        ("a...c", "abc", True),
        ("...\nb", "a\na\nb", True),
        ("a\n...", "a", True),
        ("a.c", "abc", False),
        (" a  b", "a b", True),
        ("a b", "ab", False),
    ],
)
def test_what_counts_as_shown(shown: str, printed: str, expected: bool) -> None:
    assert matches(shown.splitlines(), printed.splitlines()) is expected
