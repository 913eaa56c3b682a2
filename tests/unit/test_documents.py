"""What the documents say of options, variables, files and links is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_server.main import _parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "deploy" / "ckptd.service",
]


def sources() -> Iterator[Path]:
    for folder in ("ckpt", "server", "trainer_hooks"):
        yield from (ROOT / folder).rglob("*.py")


def operations() -> str:
    return (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_operations_name_every_option_of_the_server() -> None:
    options = {
        name for action in _parser()._actions for name in action.option_strings if name.startswith("--")
    }
    internal = {"--help", "--trainer-pid"}
    assert sorted(name for name in options - internal if f"`{name}" not in operations()) == []


def test_operations_have_the_defaults_of_the_server() -> None:
    parser = _parser()
    rows = dict(re.findall(r"^\| `(--[a-z-]+) [A-Z]`[^|]*\| (\S+) \|", operations(), re.MULTILINE))
    assert len(rows) >= 6
    for option, shown in rows.items():
        assert float(shown) == float(parser.get_default(option.removeprefix("--").replace("-", "_"))), option


def test_operations_name_every_environment_variable() -> None:
    found = {
        name
        for path in sources()
        for name in re.findall(r"\b(?:CKPT_[A-Z_]+|AWS_[A-Z][A-Z0-9_]+[A-Z0-9])\b", path.read_text("utf-8"))
    }
    table = operations().partition("\n## 6. ")[2]
    assert found
    assert sorted(name for name in found if f"`{name}`" not in table) == []


def test_operations_name_only_events_that_exist() -> None:
    code = "".join(path.read_text("utf-8") for path in sources())
    events = re.findall(r"`([a-z]+\.[a-z_]+)`", operations().partition("\n## 5. ")[2])
    logged = [name for name in events if not name.endswith((".log", ".json", ".v1", ".prune"))]
    assert len(logged) > 10
    assert [name for name in logged if f'"{name}"' not in code] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_ascii_and_their_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    targets = re.findall(r"\]\(([^)#\s]+)\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []
    named = re.findall(r"`((?:ckpt|server|trainer_hooks|proto|docs|deploy|tests)/[\w/.-]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_contributing_stays_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 100
