"""The pages keep their word: what they name exists, their commands parse, their links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import undertow
from undertow.cli import app

ROOT = Path(undertow.__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EVIDENCE = sorted((ROOT / "docs" / "evidence").glob("*.md"))
ROOMS = ("undertow", "undertow.c3", "undertow.collective", "undertow.nn", "undertow.sim")
USUAL = {"ut": "undertow", "co": "undertow.collective", "collective": "undertow.collective"}  # what blocks call them

pytestmark = pytest.mark.skipif(not PAGES[0].exists(), reason="the docs lie beside a checkout only")


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of every fenced block."""
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start()].count("\n") + 2, found[1], found[2]


def code(page: Path) -> str:
    """All that is written as code: blocks, indented lines, and what stands in backticks."""
    text = page.read_text()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return "\n".join([*(one for _, _, one in blocks(page)), *re.findall(r"^    .+$", text, re.MULTILINE), *inline])


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- Python ------------------------------------------------------------------------------------------------------------


def module_of(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


def attribute(holder: Any, name: str) -> Any:
    """As a reader gets it who imported nothing else: not a submodule that some other import has left there."""
    public = getattr(holder, "__all__", None) if isinstance(holder, ModuleType) else None
    assert public is None or name in public, f"{holder.__name__} has no {name}"
    return getattr(holder, name)


def check_python(text: str) -> None:
    """Names and keywords that belong to Undertow exist; nothing is run."""
    tree = ast.parse(text)
    known: dict[str, Any] = {name: importlib.import_module(path) for name, path in USUAL.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "undertow":
            module = importlib.import_module(str(node.module))
            for one in node.names:
                if one.name != "*":
                    found = getattr(module, one.name, None) or module_of(f"{node.module}.{one.name}")
                    assert found is not None, f"{node.module} has no {one.name}"
                    known[one.asname or one.name] = found
        elif isinstance(node, ast.Import):
            known |= {
                one.asname or "undertow": importlib.import_module(one.name if one.asname else "undertow")
                for one in node.names if one.name.split(".")[0] == "undertow"
            }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, known)
        elif isinstance(node, ast.Call):
            called = resolve(node.func, known)
            if called is not None and callable(called):
                takes = inspect.signature(called).parameters
                if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
                    unknown = {one.arg for one in node.keywords if one.arg} - set(takes)
                    assert not unknown, f"{ast.unparse(node.func)} takes no {', '.join(unknown)}"


def resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """What a dotted name of Undertow's is; None for anything else, and for what only a run could tell."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    holder = resolve(node.value, known)
    return attribute(holder, node.attr) if isinstance(holder, ModuleType) else None


def test_blocks_of_python_use_what_exists() -> None:
    found = 0
    for page in PAGES:
        for line, language, text in blocks(page):
            if language == "python":
                try:
                    check_python(text)
                except (AssertionError, SyntaxError, ImportError, AttributeError) as error:
                    raise AssertionError(f"{named(page)}:{line}: {error}") from error
                found += 1
    assert found > 20


def test_names_in_the_text_exist() -> None:
    for page in PAGES:
        for text in re.findall(r"`(ut\.[\w.]+(?:\([^`\n]*\))?)`", page.read_text()):
            text = text.replace("…", "...").replace("=)", "=0)").replace("=,", "=0,")
            if not text.endswith("."):
                try:
                    check_python(text)
                except (AssertionError, AttributeError) as error:
                    raise AssertionError(f"{named(page)}: `{text}`: {error}") from error
                except SyntaxError:
                    pass  # a sketch, such as one with a list of arguments left out


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_documented_and_is_no_submodule(room: str) -> None:
    """A name that is loaded at first use would be hidden by a submodule of that name, once anything imported it."""
    module = importlib.import_module(room)
    said = "\n".join(code(page) for page in PAGES)
    assert [name for name in module.__all__ if not re.search(rf"\b{name}\b", said)] == []
    assert set(getattr(module, "_HOMES", ())) & {one.name for one in pkgutil.iter_modules(module.__path__)} == set()


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Lines that begin with `undertow`, whole ones (with everything that is required) and mentions in the text."""
    text = page.read_text()
    for _, language, block in blocks(page):
        if not language:
            yield from ((line, True) for line in block.splitlines() if line.startswith("undertow "))
    yield from ((line.strip(), True) for line in re.findall(r"^    undertow .*$", text, re.MULTILINE))
    yield from ((line, False) for line in re.findall(r"`(undertow [a-z][^`\n]*)`", text))


COMMANDS: Any = typer.main.get_command(app)


def walk(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The command that the words name, its context, and what is left for it."""
    command = COMMANDS
    context = command.make_context("undertow", words, resilient_parsing=True)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words[0]]
        words = words[1:]
        context = command.context_class(command, info_name=command.name, parent=context)
    return command, context, words


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples are named from here
    whole = 0
    for page in PAGES:
        for line, complete in commands(page):
            command, context, words = walk(shlex.split(line, comments=True)[1:])
            options = {one for each in command.params for one in (*each.opts, *each.secondary_opts)} | {"--help"}
            if complete and not hasattr(command, "commands"):
                try:
                    command.parse_args(context, list(words))
                except Exception as error:
                    raise AssertionError(f"{named(page)}: {line}: {error}") from error
                whole += 1
            elif command.name == "undertow":
                assert [one for one in words[:1] if one.startswith("-")], f"{named(page)}: {line}: no such command"
            else:
                said = {one for one in words[: 3 if command.name == "run" else None] if re.match(r"--?[a-z]", one)}
                assert said <= options, f"{named(page)}: {line}: no {said - options}"
    assert whole > 30


def test_every_command_is_documented() -> None:
    said = "\n".join(code(page) for page in PAGES)

    def leaves(command: Any, path: str) -> Iterator[str]:
        for name, one in getattr(command, "commands", {}).items():
            yield from leaves(one, f"{path} {name}")
        if not hasattr(command, "commands"):
            yield path

    assert [path for path in leaves(COMMANDS, "undertow") if path not in said] == []


# -- links and files ---------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *EVIDENCE]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                to = page.parent / target if target else page
                assert to.exists(), f"{named(page)} links to {target}"
                assert not anchor or anchor in anchors(to), f"{named(page)} links to {target}#{anchor}"


def test_files_that_are_named_exist() -> None:
    package = ROOT / "src" / "undertow"
    for page in [*PAGES, *EVIDENCE]:
        for path in re.findall(r"(?<![\w/.])(?:tests|bench|examples)/[\w/]+\.py\b", page.read_text()):
            assert (ROOT / path).exists(), f"{named(page)} names {path}"
    for page in PAGES:
        for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", page.read_text()):
            places = (ROOT, package, package / "collective")
            assert any((place / path).exists() for place in places), f"{named(page)} names {path}"
